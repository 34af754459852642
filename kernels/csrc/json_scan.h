// Scans a JSON text while its parts arrive: counts its values, and finds the fields of its object, without decoding it.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace lmkv {

// A field of the outermost object: where its name and its value are, and what the value consists of.
struct JsonField {
  std::uint64_t name_begin, name_end, begin, end;
  std::uint64_t opened = 0;    // objects and lists
  std::uint64_t texts = 0;
  std::uint64_t commas = 0;    // between the elements of the value itself, not inside them
  bool has_words = false;      // something besides objects, lists, texts and whole numbers from 0 on
};

// What a well-formed text consists of. Of another text, the fields may be any, and are_complete may be true: only texts
// and brackets are matched.
class JsonScan {
 public:
  explicit JsonScan(std::size_t max_fields) : max_fields_(max_fields) {}

  void add(std::string_view part);

  std::uint64_t size = 0;         // bytes so far
  std::uint64_t commas = 0;       // outside of texts
  std::uint64_t opened = 0;       // objects and lists
  std::uint64_t texts = 0;        // names of fields included
  std::uint64_t colons = 0;       // outside of texts
  bool is_ascii = true;
  std::vector<JsonField> fields;  // at most max_fields, in their order
  bool has_more_fields = false;
  // Whether the text so far is one object, all of whose fields are known.
  bool is_object() const { return state_ == State::after; }

 private:
  enum class State { before, name_or_end, name, in_name, colon, value, in_value, after, broken };

  const char* skip_text(const char* at, const char* end);
  void open_text(std::uint64_t at);
  void close_text(std::uint64_t at);
  void take(char character, std::uint64_t at);
  void begin_value(std::uint64_t at);
  void end_value(State next);

  std::size_t max_fields_;
  State state_ = State::before;
  JsonField field_{};
  std::uint64_t depth_ = 0;  // of lists and objects inside the value of a field
  bool is_in_text_ = false;
  bool is_escaped_ = false;  // whether the next character is
};

}  // namespace lmkv
