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
// What is there when calls differ, or may do so, and what all members then say.
const char* const kCompare = "compare calls";
const char* const kVerdictKey = "opensmd/verdict";
const char* const kCallsKey = "opensmd/calls/";
const char* const kWaitingKey = "opensmd/waiting/";  // likewise, of those that wait for long
const char* const kToldKey = "opensmd/told/";
// In which the first member, whose process may serve the store, waits for others to read there what has failed.
constexpr milliseconds kPartingTime{500};
// In which members that are in a call have posted their calls after their connections closed: where it is known that calls
// differ, and where one has waited for its timeout already.
constexpr milliseconds kCallsTime{6000};
constexpr milliseconds kLateCallsTime{2000};
// In which a member that fails has posted its report after its connections closed.
constexpr milliseconds kReportsTime{300};

// Whether all keys are there in time. A wait of torch's would keep other threads from their stores meanwhile.
// `instead`: a key that ends the waiting, too.
bool come(c10d::Store& store, const std::vector<std::string>& keys, milliseconds time, const char* instead = nullptr) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (!store.check(keys)) {
    if (std::chrono::steady_clock::now() >= end || (instead != nullptr && store.check({instead}))) return false;
    std::this_thread::sleep_for(milliseconds{5});
  }
  return true;
}

// Empty where those that have told have called the same.
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

// Whether a member has lost others, without a word of how.
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
    lost = closed();  // now: others will follow
    first = await(kKey, kReportsTime);
    if (lost.empty()) lost = closed();
    if (!lost.empty()) own = where + ": " + (first.empty() ? death(lost) : death_of(lost));
  }
  const bool differs = dynamic_cast<const DifferentCalls*>(&error) != nullptr;
  const bool late = wait.late;  // or those that it waits for call something else
  // A mismatch of another kind is found by all members alike.
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

// The process of the first member may have served the store. Without it nobody can say why it closes its connections.
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

// The first report of the group under this key, which may be this one; empty where the store does not answer.
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

// The script of the first member may end now, and the store with it.
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

// In what the members' calls differ, as far as they tell in time; else what this or another one knows.
std::string Failure::compared_calls(const std::string& known, std::chrono::milliseconds time, int peer) const {
  const auto rank = static_cast<size_t>(wire_->rank());
  const auto compared = within(time + kStoresTime, [store = store_, names = wire_->names(), keys = keys_of(kCallsKey),
                                                    own = own_calls(), time, rank, known, peer] {
    store->set(keys[rank], own);
    come(*store, keys, time, kVerdictKey);
    const std::string difference = difference_in(*store, names, keys);
    if (!difference.empty()) return in_words(difference);
    // Who waits may wait for one that waits itself. Those that no message was expected from need not be in a call.
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
