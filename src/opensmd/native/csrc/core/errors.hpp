// What the core throws. what() is the whole message for the user: ranks, operation, sequence number, what to do.
// Wrong arguments (an unsupported dtype, a negative root) are std::invalid_argument instead and leave the group usable.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace opensmd {

class CollectiveError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A member's process died, or left the group while others still needed it.
class PeerLost : public CollectiveError {
 public:
  using CollectiveError::CollectiveError;
};

class TimedOut : public CollectiveError {
 public:
  using CollectiveError::CollectiveError;
  TimedOut(const std::string& message, std::vector<std::string> absent)
      : CollectiveError(message), absent_(std::move(absent)) {}

  // Names of the members that had not entered the collective.
  const std::vector<std::string>& absent() const { return absent_; }

 private:
  std::vector<std::string> absent_;
};

// Members called different operations, sizes, dtypes, reductions or roots at one sequence number.
class Mismatch : public CollectiveError {
 public:
  using CollectiveError::CollectiveError;
};

// The group failed earlier; the message quotes the first cause.
class Aborted : public CollectiveError {
 public:
  using CollectiveError::CollectiveError;
};

enum class ErrorKind : uint32_t { Other, PeerLost, TimedOut, Mismatch, Aborted };

[[noreturn]] void throw_error(ErrorKind kind, const std::string& message);

}  // namespace opensmd
