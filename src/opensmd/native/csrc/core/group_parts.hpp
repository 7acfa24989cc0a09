// What a Group is made of.
#pragma once

#include "core/messages/mailbox.hpp"
#include "core/protocol/context.hpp"

namespace opensmd {

struct GroupParts {
  explicit GroupParts(GroupConfig config) : context(std::move(config)), mailbox(context) {}
  Context context;
  Mailbox mailbox;
};

}  // namespace opensmd
