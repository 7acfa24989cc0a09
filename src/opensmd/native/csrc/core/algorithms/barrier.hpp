// No member leaves before all have arrived.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

void barrier(Context& context, const Call& call);

}  // namespace opensmd
