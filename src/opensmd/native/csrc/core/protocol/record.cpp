#include "core/protocol/record.hpp"

#include <algorithm>
#include <cstring>

#include "core/protocol/clock.hpp"

namespace opensmd {

namespace {

constexpr auto relaxed = std::memory_order_relaxed;

uint64_t pack_kind(const Signature& s) {
  return static_cast<uint64_t>(s.operation) | static_cast<uint64_t>(s.dtype) << 8 |
         static_cast<uint64_t>(s.reduction) << 16 | static_cast<uint64_t>(static_cast<uint32_t>(s.root)) << 32;
}

bool has_reduction(Operation operation) {
  return operation == Operation::AllReduce || operation == Operation::Reduce || operation == Operation::ReduceScatter;
}

bool is_message(Operation operation) { return operation == Operation::Send || operation == Operation::Receive; }

}  // namespace

uint32_t Signature::hash() const {
  uint64_t mixed = pack_kind(*this) * 0x9e3779b97f4a7c15u;
  // Each member of an all_to_all has its own counts; they are compared pair by pair instead.
  const uint64_t common = operation == Operation::AllToAll ? 0 : count;
  mixed ^= (common + 0x7f4a7c15u) * 0xd6e8feb86659fd93u;
  mixed = (mixed ^ (mixed >> 29)) * 0xbf58476d1ce4e5b9u;
  mixed ^= shape_hash * 0x94d049bb133111ebu;
  mixed = (mixed ^ (mixed >> 32)) * 0x9e3779b97f4a7c15u;
  return static_cast<uint32_t>(mixed >> 32);
}

uint64_t Record::begin(uint64_t sequence, const Signature& signature, std::string_view text) {
  RecordLine& to = line(sequence);
  to.sequence.store(sequence, relaxed);
  to.kind.store(pack_kind(signature), relaxed);
  to.tag.store(static_cast<uint64_t>(signature.tag), relaxed);
  to.count.store(signature.count, relaxed);
  to.bytes.store(signature.count * size_of(signature.dtype), relaxed);
  to.end_ns.store(0, relaxed);
  const uint64_t start = now_ns();
  to.start_ns.store(start, relaxed);
  if (text.empty()) {
    to.text[0].store(0, relaxed);
    return start;
  }
  uint64_t words[kTextBytes / 8] = {};
  std::memcpy(words, text.data(), std::min(text.size(), kTextBytes - 1));
  for (size_t i = 0; i < kTextBytes / 8; ++i) to.text[i].store(words[i], relaxed);
  return start;
}

uint64_t Record::end(uint64_t sequence) {
  RecordLine& to = line(sequence);
  const uint64_t end = now_ns();
  if (to.sequence.load(relaxed) == sequence) to.end_ns.store(end, relaxed);
  return end;
}

RecordEntry Record::at(uint64_t sequence) const {
  const RecordLine& from = line(sequence);
  RecordEntry entry;
  entry.sequence = from.sequence.load(relaxed);
  const uint64_t kind = from.kind.load(relaxed);
  entry.operation = static_cast<Operation>(kind & 0xff);
  entry.dtype = static_cast<DType>(kind >> 8 & 0xff);
  entry.reduction = static_cast<Reduction>(kind >> 16 & 0xff);
  entry.root = static_cast<int>(static_cast<uint32_t>(kind >> 32));
  entry.tag = static_cast<int64_t>(from.tag.load(relaxed));
  entry.count = from.count.load(relaxed);
  entry.bytes = from.bytes.load(relaxed);
  entry.start_ns = from.start_ns.load(relaxed);
  entry.end_ns = from.end_ns.load(relaxed);
  uint64_t words[kTextBytes / 8 + 1] = {};
  for (size_t i = 0; i < kTextBytes / 8; ++i) words[i] = from.text[i].load(relaxed);
  entry.text = reinterpret_cast<const char*>(words);
  return entry;
}

std::vector<RecordEntry> Record::latest(uint64_t last) const {
  std::vector<RecordEntry> entries;
  const uint64_t first = last > kRecordLength ? last - kRecordLength + 1 : 1;
  for (uint64_t sequence = first; sequence <= last; ++sequence) {
    RecordEntry entry = at(sequence);
    if (entry.sequence == sequence) entries.push_back(std::move(entry));
  }
  return entries;
}

std::string RecordEntry::describe(const std::vector<std::string>* names) const {
  std::string words = std::string(name_of(operation)) + "(";
  if (is_message(operation)) {
    words += operation == Operation::Send ? "to " : "from ";
    words += root < 0 ? "any" : std::to_string(root);
    words += ", tag=" + std::to_string(tag) + ", bytes=" + std::to_string(bytes);
  } else if (operation != Operation::Barrier) {
    if (has_reduction(operation)) words += std::string(name_of(reduction)) + ", ";
    words += std::string(name_of(dtype)) + ", count=" + std::to_string(count);
    const bool named = names != nullptr && root >= 0 && static_cast<size_t>(root) < names->size();
    if (root >= 0) words += ", root=" + (named ? (*names)[static_cast<size_t>(root)] : std::to_string(root));
  }
  words += ")";
  return text.empty() ? words : words + " " + text;
}

}  // namespace opensmd
