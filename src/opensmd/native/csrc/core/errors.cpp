#include "core/errors.hpp"

namespace opensmd {

void throw_error(ErrorKind kind, const std::string& message) {
  switch (kind) {
    case ErrorKind::PeerLost: throw PeerLost(message);
    case ErrorKind::TimedOut: throw TimedOut(message);
    case ErrorKind::Mismatch: throw Mismatch(message);
    case ErrorKind::Aborted: throw Aborted(message);
    case ErrorKind::Other: break;
  }
  throw CollectiveError(message);
}

}  // namespace opensmd
