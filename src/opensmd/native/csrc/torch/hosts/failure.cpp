#include "torch/hosts/failure.hpp"

#include <ATen/ATen.h>

#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "core/protocol/context.hpp"
#include "core/errors.hpp"
#include "torch/hosts/wire.hpp"

namespace opensmd {
namespace {

const char* const kKey = "opensmd/failure";
// In which a member that fails has posted its report after its connections closed.
constexpr milliseconds kReportsTime{300};
// The process that serves the store may be the dead one, or stopped.
constexpr milliseconds kStoresTime{1000};

// What `work` returns, or nothing where it fails or takes too long; then its thread is left behind.
std::string within(milliseconds limit, std::function<std::string()> work) {
  auto promise = std::make_shared<std::promise<std::string>>();
  auto answer = promise->get_future();
  std::thread([promise, work = std::move(work)] {
    try {
      promise->set_value(work());
    } catch (...) {
      promise->set_value("");
    }
  }).detach();
  return answer.wait_for(limit) == std::future_status::ready ? answer.get() : "";
}

// Whether a member has lost others, without a word of how.
bool tells_of_closed_connections(const std::string& text) {
  static constexpr std::array<const char*, 5> kWords{"lost the connection", "Connection closed by peer",
                                                     "Connection reset by peer", "Broken pipe", "Socket closed"};
  for (const char* words : kWords) {
    if (text.find(words) != std::string::npos) return true;
  }
  return false;
}

std::string death_of(const std::vector<std::string>& members) {
  return join_names(members) + (members.size() > 1 ? " have" : " has") +
         " died or cannot be reached: connections closed without a report of why";
}

}  // namespace

Failure::Failure(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
                 std::vector<std::string> names)
    : gloo_(std::move(gloo)), store_(std::move(store)), names_(std::move(names)) {}

std::string Failure::note(const std::string& where, const std::exception& error) {
  {
    std::lock_guard lock(mutex_);
    if (!counts_.empty()) return counts_;
  }
  std::string own = where + ": " + error.what(), first;
  if (tells_of_closed_connections(error.what())) {
    auto lost = closed();  // now: others will follow
    first = await_report();
    if (lost.empty()) lost = closed();
    if (!lost.empty()) own = where + ": " + death_of(lost);
  }
  if (first.empty() && dynamic_cast<const Mismatch*>(&error) == nullptr) first = report(own);
  note(first.empty() || first == own ? own : where + ": " + first);
  std::lock_guard lock(mutex_);
  return counts_;
}

std::string Failure::note_message(const std::string& where, const std::exception& error) {
  const std::string text = error.what();
  const bool timed_out = text.find("Timed out") != std::string::npos;  // Gloo then closes all connections
  return timed_out || tells_of_closed_connections(text) ? note(where, error) : where + ": " + text;
}

void Failure::note(const std::string& cause) {
  std::lock_guard lock(mutex_);
  if (counts_.empty()) counts_ = cause;
}

bool Failure::noted() const {
  std::lock_guard lock(mutex_);
  return !counts_.empty();
}

void Failure::require_none() const {
  std::lock_guard lock(mutex_);
  if (!counts_.empty()) throw Aborted(counts_);
}

// Gloo throws at once where it is asked to send over a closed connection.
std::vector<std::string> Failure::closed() const {
  at::Tensor nothing = at::empty({1}, at::kByte);
  std::vector<std::string> names;
  for (int member = 0; member < gloo_->getSize(); ++member) {
    if (member == gloo_->getRank()) continue;
    try {
      std::vector<at::Tensor> tensors{nothing};
      gloo_->send(tensors, member, kNobodysTag);
    } catch (const std::exception&) {
      names.push_back(name(member));
    }
  }
  return names;
}

std::string Failure::await_report() const {
  return within(kReportsTime + kStoresTime, [store = store_] {
    store->wait({kKey}, kReportsTime);
    return store->get_to_str(kKey);
  });
}

// The first report of the group, which may be this one; empty where the store does not answer.
std::string Failure::report(const std::string& text) const {
  return within(kStoresTime, [store = store_, text] { return store->compareSet(kKey, "", text); });
}

}  // namespace opensmd
