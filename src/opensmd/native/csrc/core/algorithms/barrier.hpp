// Nobody leaves before everybody has come.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

void barrier(Context& context, const Call& call);

}  // namespace opensmd
