#include "torch/hosts/call_history.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "core/protocol/context.hpp"
#include "torch/hosts/agreement.hpp"

namespace opensmd {
namespace {

struct Told {
  uint32_t hash;
  std::string call;
};

using History = std::map<uint64_t, Told>;

// Lines of "sequence hash call".
History read(const std::string& text) {
  History history;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    uint64_t sequence = 0;
    Told told{};
    words >> sequence >> told.hash;
    std::getline(words >> std::ws, told.call);
    history[sequence] = std::move(told);
  }
  return history;
}

// The oldest call that all reports still hold; earlier ones are forgotten.
uint64_t oldest_common(const std::vector<History>& all) {
  uint64_t oldest = 0;
  for (const auto& history : all) {
    if (!history.empty()) oldest = std::max(oldest, history.begin()->first);
  }
  return oldest;
}

std::optional<uint64_t> first_that_differs(const std::vector<History>& all) {
  std::map<uint64_t, std::set<uint32_t>> calls;
  for (const auto& history : all) {
    for (const auto& [sequence, told] : history) calls[sequence].insert(told.hash);
  }
  for (auto at = calls.lower_bound(oldest_common(all)); at != calls.end(); ++at) {
    if (at->second.size() > 1) return at->first;
  }
  return std::nullopt;
}

}  // namespace

void CallHistory::add(uint64_t sequence, const Signature& signature, std::string_view text) {
  Entry& entry = entries_[sequence % entries_.size()];
  entry.sequence = sequence;
  entry.signature = signature;
  entry.text = text;
}

std::string CallHistory::text() const {
  std::string lines;
  for (const auto& entry : entries_) {
    if (entry.sequence == 0) continue;
    lines += std::to_string(entry.sequence) + " " + std::to_string(entry.signature.hash()) + " " +
             describe(entry.signature, entry.text) + "\n";
  }
  return lines;
}

std::optional<std::string> first_difference(const std::vector<std::string>& names,
                                            const std::vector<std::string>& texts) {
  std::vector<History> all;
  for (const auto& text : texts) all.push_back(read(text));
  const auto sequence = first_that_differs(all);
  if (!sequence) return std::nullopt;
  std::vector<std::pair<std::string, std::vector<std::string>>> callers;  // by call, in the order of members
  std::vector<std::string> silent;
  for (size_t member = 0; member < names.size(); ++member) {
    const auto found = all[member].find(*sequence);
    if (found == all[member].end()) {
      silent.push_back(names[member]);
      continue;
    }
    auto same = std::find_if(callers.begin(), callers.end(),
                             [&](const auto& each) { return each.first == found->second.call; });
    if (same == callers.end()) same = callers.insert(same, {found->second.call, {}});
    same->second.push_back(names[member]);
  }
  std::string words;
  for (const auto& [call, who] : callers) words += (words.empty() ? "" : "; ") + join_names(who) + " called " + call;
  if (!silent.empty()) words += "; " + join_names(silent) + (silent.size() > 1 ? " have" : " has") + " not told";
  return words;
}

}  // namespace opensmd
