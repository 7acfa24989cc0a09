// What a Group is made of.
#pragma once

#include "context.hpp"
#include "mailbox.hpp"

namespace opensmd {

struct GroupParts {
  explicit GroupParts(GroupConfig config) : context(std::move(config)), mailbox(context) {}
  Context context;
  Mailbox mailbox;
};

}  // namespace opensmd
