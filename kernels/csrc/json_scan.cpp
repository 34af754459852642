#include "json_scan.h"

#include <bit>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace lmkv {
namespace {

bool is_space(char character) {
  return character == ' ' || character == '\n' || character == '\t' || character == '\r';
}

bool is_digit(char character) { return character >= '0' && character <= '9'; }

}  // namespace

void JsonScan::add(std::string_view part) {
  const char* const begin = part.data();
  const char* const end = begin + part.size();
  for (const char* at = begin; at != end;) {
    if (is_in_text_) {
      at = skip_text(at, end);
      if (at == end) break;
      is_in_text_ = false;
      close_text(size + static_cast<std::uint64_t>(at++ - begin));
      continue;
    }
    const char character = *at;
    if (state_ == State::in_value && is_digit(character)) {
      do ++at;
      while (at != end && is_digit(*at));
      field_.end = size + static_cast<std::uint64_t>(at - begin);
      continue;
    }
    const std::uint64_t offset = size + static_cast<std::uint64_t>(at++ - begin);
    if (character == '"') {
      is_in_text_ = true;
      ++texts;
      open_text(offset);
      continue;
    }
    if (is_space(character)) continue;
    if (character < 0) is_ascii = false;
    commas += character == ',';
    colons += character == ':';
    opened += character == '[' || character == '{';
    take(character, offset);
  }
  size += part.size();
}

// The quote that ends the text, or the end.
const char* JsonScan::skip_text(const char* at, const char* end) {
  if (is_escaped_ && at != end) {
    if (*at < 0) is_ascii = false;
    is_escaped_ = false;
    ++at;
  }
  while (at != end) {
#if defined(__SSE2__)
    while (end - at >= 16 && *at != '\\' && *at != '"') {
      const __m128i block = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
      const __m128i marks = _mm_or_si128(_mm_cmpeq_epi8(block, _mm_set1_epi8('"')),
                                         _mm_cmpeq_epi8(block, _mm_set1_epi8('\\')));
      const auto found = static_cast<std::uint32_t>(_mm_movemask_epi8(marks));
      const auto wide = static_cast<std::uint32_t>(_mm_movemask_epi8(block));
      const int count = found ? std::countr_zero(found) : 16;
      if (wide & ((1u << count) - 1)) is_ascii = false;
      at += count;
      if (found) break;
    }
    if (at == end) break;
#endif
    if (*at == '"') return at;
    if (*at < 0) is_ascii = false;
    if (*at++ != '\\') continue;
    if (at == end) {
      is_escaped_ = true;
      break;
    }
    if (*at < 0) is_ascii = false;
    ++at;
  }
  return end;
}

void JsonScan::open_text(std::uint64_t at) {
  switch (state_) {
    case State::name_or_end:
    case State::name:
      field_ = JsonField{};
      field_.name_begin = at;
      state_ = State::in_name;
      break;
    case State::value:
      begin_value(at);
      [[fallthrough]];
    case State::in_value:
      ++field_.texts;
      break;
    default:
      state_ = State::broken;
  }
}

void JsonScan::close_text(std::uint64_t at) {
  if (state_ == State::in_name) {
    field_.name_end = at + 1;
    state_ = State::colon;
  } else if (state_ == State::in_value) {
    field_.end = at + 1;
  }
}

// A character outside of texts that is no white space.
void JsonScan::take(char character, std::uint64_t at) {
  switch (state_) {
    case State::before:
      state_ = character == '{' ? State::name_or_end : State::broken;
      return;
    case State::name_or_end:
      state_ = character == '}' ? State::after : State::broken;
      return;
    case State::colon:
      state_ = character == ':' ? State::value : State::broken;
      return;
    case State::value:
      if (character == ',' || character == '}' || character == ']') {
        state_ = State::broken;
        return;
      }
      begin_value(at);
      break;
    case State::in_value:
      break;
    default:
      state_ = State::broken;
      return;
  }
  switch (character) {
    case '[':
    case '{':
      ++field_.opened;
      ++depth_;
      break;
    case ']':
    case '}':
      if (depth_ == 0) {
        if (character == '}') end_value(State::after);
        else state_ = State::broken;
        return;
      }
      --depth_;
      break;
    case ',':
      if (depth_ == 0) return end_value(State::name);
      if (depth_ == 1) ++field_.commas;
      break;
    case ':':
      break;
    default:
      if (!is_digit(character)) field_.has_words = true;
  }
  field_.end = at + 1;
}

void JsonScan::begin_value(std::uint64_t at) {
  field_.begin = at;
  depth_ = 0;
  state_ = State::in_value;
}

void JsonScan::end_value(State next) {
  if (fields.size() < max_fields_) fields.push_back(field_);
  else has_more_fields = true;
  state_ = next;
}

}  // namespace lmkv
