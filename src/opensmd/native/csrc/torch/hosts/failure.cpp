#include "torch/hosts/failure.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <utility>

#include "core/protocol/context.hpp"
#include "core/errors.hpp"
#include "torch/hosts/agreement.hpp"
#include "torch/hosts/within.hpp"

namespace opensmd {
namespace {

const char* const kKey = "opensmd/failure";
// What the failure key holds when calls differ or may differ; all members then report the verdict.
const char* const kCompare = "compare calls";
const char* const kVerdictKey = "opensmd/verdict";
const char* const kCallsKey = "opensmd/calls/";
const char* const kWaitingKey = "opensmd/waiting/";  // likewise, of members that have waited long
const char* const kToldKey = "opensmd/told/";
// How long the first member, whose process may serve the store, waits for others to read the failure there.
constexpr milliseconds kPartingTime{500};
// Within this time after their connections close, members that are in a call have posted their calls: where calls are
// known to differ, and where a member has already waited for its timeout.
constexpr milliseconds kCallsTime{6000};
constexpr milliseconds kLateCallsTime{2000};
// Within this time after its connections close, a failing member has posted its report.
constexpr milliseconds kReportsTime{300};

// Whether all keys arrive in time. Torch's own wait would keep other threads from their stores. `instead`: a key that
// also ends the wait.
bool come(c10d::Store& store, const std::vector<std::string>& keys, milliseconds time, const char* instead = nullptr) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (!store.check(keys)) {
    if (std::chrono::steady_clock::now() >= end || (instead != nullptr && store.check({instead}))) return false;
    std::this_thread::sleep_for(milliseconds{5});
  }
  return true;
}

// Empty if the members that have reported called the same.
std::string difference_in(c10d::Store& store, const std::vector<std::string>& names,
                          const std::vector<std::string>& keys) {
  std::vector<std::string> texts;
  for (const auto& key : keys) texts.push_back(store.check({key}) ? store.get_to_str(key) : "");
  return first_difference(names, texts).value_or("");
}

std::vector<std::string> silent_of(c10d::Store& store, const std::vector<std::string>& names,
                                   const std::vector<std::string>& keys) {
  std::vector<std::string> silent;
  for (size_t member = 0; member < names.size(); ++member) {
    if (!store.check({keys[member]})) silent.push_back(names[member]);
  }
  return silent;
}

// Whether the text says only that connections were lost, not why.
bool tells_of_closed_connections(const std::string& text) {
  static constexpr std::array<const char*, 5> kWords{"lost the connection", "Connection closed by peer",
                                                     "Connection reset by peer", "Broken pipe", "Socket closed"};
  for (const char* words : kWords) {
    if (text.find(words) != std::string::npos) return true;
  }
  return false;
}

std::string in_words(const std::string& difference) {
  return "the ranks of the group made different calls: " + difference +
         ". All must call the same operations with the same sizes in the same order";
}

std::string death_of(const std::vector<std::string>& members) {
  return join_names(members) + (members.size() > 1 ? " have" : " has") +
         " died or cannot be reached: connections closed without a report of why";
}

}  // namespace

Failure::Failure(std::shared_ptr<Wire> wire, c10::intrusive_ptr<c10d::Store> store, Interrupt interrupt)
    : wire_(std::move(wire)), store_(std::move(store)), interrupt_(std::move(interrupt)) {}

void Failure::note_call(uint64_t sequence, const Signature& signature, std::string_view text) {
  std::lock_guard lock(mutex_);
  calls_.add(sequence, signature, text);
}

std::string Failure::note(const std::string& where, const std::exception& error) {
  return note(where, error, {dynamic_cast<const TimedOut*>(&error) != nullptr});
}

std::string Failure::note(const std::string& where, const std::exception& error, Wait wait) {
  {
    std::lock_guard lock(mutex_);
    if (!counts_.empty()) return counts_;
  }
  std::string own = where + ": " + error.what(), first;
  std::vector<std::string> lost;
  if (tells_of_closed_connections(error.what())) {
    lost = closed();  // now: more connections will close
    first = await(kKey, kReportsTime);
    if (lost.empty()) lost = closed();
    if (!lost.empty()) own = where + ": " + (first.empty() ? death(lost) : death_of(lost));
  }
  const bool differs = dynamic_cast<const DifferentCalls*>(&error) != nullptr;
  const bool late = wait.late;  // or the members it waits for have called something else
  // Every member finds any other kind of mismatch by itself.
  const bool known = differs || dynamic_cast<const Mismatch*>(&error) == nullptr;
  if (first.empty() && known) first = report(kKey, differs || late ? kCompare : own);
  if (first == kCompare) {
    interrupt_("ranks of the group have called different collectives, or not in time");
    first = compared_calls(differs ? in_words(error.what()) : late ? own : "", late ? kLateCallsTime : kCallsTime,
                           wait.peer);
  }
  note(first.empty() || first == own ? own : where + ": " + first);
  std::string counts;
  {
    std::lock_guard lock(mutex_);
    counts = counts_;
  }
  interrupt_(counts);
  part(lost);
  return counts;
}

std::string Failure::note_message(const std::string& where, int peer, const std::exception& error) {
  const std::string text = error.what();
  const bool timed_out = text.find("Timed out") != std::string::npos;  // Gloo then closes all connections
  if (!timed_out && !tells_of_closed_connections(text)) return where + ": " + text;
  return note(where, error, {timed_out, peer});
}

void Failure::note(const std::string& cause) {
  std::lock_guard lock(mutex_);
  if (counts_.empty()) counts_ = cause;
}

void Failure::end(const std::string& cause) {
  if (!noted()) report(kKey, cause);
  note(cause);
  interrupt_(cause);
}

bool Failure::noted() const {
  std::lock_guard lock(mutex_);
  return !counts_.empty();
}

void Failure::require_none() const {
  std::lock_guard lock(mutex_);
  if (!counts_.empty()) throw Aborted(counts_);
}

std::vector<std::string> Failure::closed() const {
  std::vector<std::string> names;
  for (int member = 0; member < wire_->size(); ++member) {
    if (member != wire_->rank() && wire_->is_lost(member)) names.push_back(name(member));
  }
  return names;
}

// The first member's process may have served the store. Without the store, no member can say why it closed its
// connections.
std::string Failure::death(const std::vector<std::string>& lost) const {
  const bool first = lost.front() == name(0);
  if (!first || lost.size() == 1 || store_answers()) return death_of(lost);
  return death_of({lost.front()}) + ". Connections to " + join_names({lost.begin() + 1, lost.end()}) +
         " closed, too; why is not known, as the store does not answer";
}

bool Failure::store_answers() const {
  return !within(kStoresTime, [store = store_] {
            store->check({kKey});
            return std::string("yes");
          }).empty();
}

std::string Failure::await(const std::string& key, std::chrono::milliseconds time) const {
  return within(time + kStoresTime, [store = store_, key, time] {
    return come(*store, {key}, time) ? store->get_to_str(key) : "";
  });
}

// The group's first report under this key, possibly this one; empty if the store does not answer.
std::string Failure::report(const std::string& key, const std::string& text) const {
  return within(kStoresTime, [store = store_, key, text] { return store->compareSet(key, "", text); });
}

void Failure::look_for_failure() {
  if (!noted() && store_->check({kKey})) interrupt_("another rank of the group has failed");
}

void Failure::look_closer() {
  if (noted()) return;
  wire_->end_lost_waits();
  const auto keys = keys_of(kWaitingKey);
  store_->set(keys[static_cast<size_t>(wire_->rank())], own_calls());
  if (difference_in(*store_, wire_->names(), keys).empty()) return;
  report(kKey, kCompare);
  interrupt_("ranks of the group have called different collectives");
}

std::vector<std::string> Failure::keys_of(const char* prefix) const {
  std::vector<std::string> keys;
  for (size_t member = 0; member < wire_->names().size(); ++member) keys.push_back(prefix + std::to_string(member));
  return keys;
}

std::string Failure::own_calls() const {
  std::lock_guard lock(mutex_);
  return calls_.text();
}

// After this the first member's script may end, and the store with it.
void Failure::part(const std::vector<std::string>& lost) const {
  std::vector<std::string> keys;
  for (size_t member = 0; member < wire_->names().size(); ++member) {
    const bool gone = std::find(lost.begin(), lost.end(), wire_->names()[member]) != lost.end();
    if (!gone) keys.push_back(kToldKey + std::to_string(member));
  }
  const int own = wire_->rank();
  within(own == 0 ? kPartingTime + kStoresTime : kStoresTime, [store = store_, keys, own] {
    store->set(kToldKey + std::to_string(own), "");
    if (own == 0) come(*store, keys, kPartingTime);
    return std::string();
  });
}

// How the members' calls differ, judging by those that report in time; else what this member or another knows.
std::string Failure::compared_calls(const std::string& known, std::chrono::milliseconds time, int peer) const {
  const auto rank = static_cast<size_t>(wire_->rank());
  const auto compared = within(time + kStoresTime, [store = store_, names = wire_->names(), keys = keys_of(kCallsKey),
                                                    own = own_calls(), time, rank, known, peer] {
    store->set(keys[rank], own);
    come(*store, keys, time, kVerdictKey);
    const std::string difference = difference_in(*store, names, keys);
    if (!difference.empty()) return in_words(difference);
    // A waiting member may wait for one that itself waits. Members from which no message was expected need not be in a
    // call.
    const bool peer_answers = peer == kAnySource || store->check({keys[static_cast<size_t>(peer)]});
    const auto silent = silent_of(*store, names, keys);
    if (known.empty() || silent.empty() || !peer_answers) return known;
    return known + "; no answer from: " + join_names(silent);
  });
  const std::string words = compared.empty() ? known : compared;
  const std::string first = words.empty() ? await(kVerdictKey, time) : report(kVerdictKey, words);
  return first.empty() ? words : first;
}

}  // namespace opensmd
