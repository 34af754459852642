// Python bindings of the host kernels. They do not check arguments: lmkv_kernels.host does.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "chunk_copy.h"
#include "chunk_keys.h"
#include "codec.h"
#include "difference.h"
#include "json_scan.h"
#include "token_ids.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename Scalar>
using Vector = nb::ndarray<Scalar, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PoolBytes = Vector<std::uint8_t>;
using ReadOnlyPoolBytes = Vector<const std::uint8_t>;
using Addresses = Vector<const std::uint64_t>;
using Geometry = nb::ndarray<const std::int64_t, nb::shape<15>, nb::c_contig, nb::device::cpu>;
using Copies = nb::ndarray<const std::int64_t, nb::shape<-1, 6>, nb::c_contig, nb::device::cpu>;
using BlockIds = Vector<const std::int64_t>;

const lmkv::TileKernels& kernels(bool portable) {
  return portable ? lmkv::portable_kernels() : lmkv::best_kernels();
}

template <typename Scalar>
std::span<Scalar> span_of(const Vector<Scalar>& vector) {
  return {vector.data(), vector.size()};
}

lmkv::Pages pages_of(const Addresses& layers, const Geometry& geometry) {
  const std::int64_t* field = geometry.data();
  const auto next = [&] { return *field++; };
  lmkv::Pages pages;
  pages.layer_count = static_cast<std::int64_t>(layers.size());
  for (auto* value : {&pages.block_stride_bytes, &pages.head_stride_bytes, &pages.rows_per_block, &pages.row_bytes,
                      &pages.element_bytes, &pages.head_count, &pages.first_head, &pages.kv_head_count,
                      &pages.part_count}) {
    *value = next();
  }
  for (lmkv::Part& part : pages.parts) {
    part.offset = next();
    part.row_stride = next();
    part.element_stride = next();
  }
  return pages;
}

std::vector<lmkv::ChunkCopy> copies_of(const Copies& copies) {
  std::vector<lmkv::ChunkCopy> rows;
  rows.reserve(copies.shape(0));
  std::int64_t first_id = 0;
  for (std::size_t row = 0; row < copies.shape(0); ++row) {
    const std::int64_t* field = copies.data() + 6 * row;
    rows.push_back({field[0], field[1], field[2], field[3], field[4], first_id});
    first_id += field[5];
  }
  return rows;
}

void gather(const Addresses& layers, const Geometry& geometry, const PoolBytes& pool, const Copies& copies,
            const BlockIds& block_ids, const Vector<std::uint64_t>& checksums, int threads, bool portable) {
  const auto rows = copies_of(copies);
  nb::gil_scoped_release unlocked;
  lmkv::gather(kernels(portable), pages_of(layers, geometry), span_of(layers),
               reinterpret_cast<std::byte*>(pool.data()), rows, span_of(block_ids), threads, span_of(checksums));
}

void scatter(const Addresses& layers, const Geometry& geometry, const ReadOnlyPoolBytes& pool, const Copies& copies,
             const BlockIds& block_ids, int threads, bool portable) {
  const auto rows = copies_of(copies);
  nb::gil_scoped_release unlocked;
  lmkv::scatter(kernels(portable), pages_of(layers, geometry), span_of(layers),
                reinterpret_cast<const std::byte*>(pool.data()), rows, span_of(block_ids), threads);
}

std::uint64_t checksum(const ReadOnlyPoolBytes& pool, std::size_t offset, std::size_t size_bytes, int threads,
                       bool portable) {
  nb::gil_scoped_release unlocked;
  return lmkv::checksum(kernels(portable), reinterpret_cast<const std::byte*>(pool.data()) + offset, size_bytes,
                        threads);
}

std::uint64_t summed_copy(std::uint64_t target, std::uint64_t source, std::int64_t size_bytes, std::uint64_t first_word,
                          bool portable) {
  nb::gil_scoped_release unlocked;
  const lmkv::TileKernels& with = kernels(portable);
  const std::uint64_t sum = with.gather(reinterpret_cast<const std::byte*>(source), 0,
                                        reinterpret_cast<std::byte*>(target), size_bytes, 1, first_word);
  with.publish();
  return sum;
}

nb::bytes chunk_keys(const Vector<const std::uint32_t>& tokens, const ReadOnlyPoolBytes& root, std::size_t chunk_size,
                     bool portable) {
  lmkv::KeyBytes first;
  std::copy_n(root.data(), first.size(), first.begin());
  std::vector<lmkv::KeyBytes> keys;
  {
    nb::gil_scoped_release unlocked;
    keys = lmkv::chunk_keys(span_of(tokens), first, chunk_size, portable);
  }
  return nb::bytes(keys.data(), keys.size() * sizeof(lmkv::KeyBytes));
}

nb::bytes token_ids(const ReadOnlyPoolBytes& json) {
  const std::string_view text{reinterpret_cast<const char*>(json.data()), json.size()};
  std::vector<std::uint32_t> ids;
  {
    nb::gil_scoped_release unlocked;
    ids = lmkv::token_ids(text);
  }
  return nb::bytes(ids.data(), ids.size() * sizeof(std::uint32_t));
}

void add_part(lmkv::JsonScan& scan, const nb::bytes& part) {
  const std::string_view text{part.c_str(), part.size()};
  nb::gil_scoped_release unlocked;
  scan.add(text);
}

// Rows of name_begin, name_end, begin, end, opened, texts, commas and has_words.
nb::bytes fields_of(const lmkv::JsonScan& scan) {
  std::vector<std::uint64_t> rows;
  rows.reserve(8 * scan.fields.size());
  for (const lmkv::JsonField& field : scan.fields) {
    rows.insert(rows.end(), {field.name_begin, field.name_end, field.begin, field.end, field.opened, field.texts,
                             field.commas, field.has_words});
  }
  return nb::bytes(rows.data(), rows.size() * sizeof(std::uint64_t));
}

lmkv::CodecFormat codec_format(int element, int code, std::int64_t plane_elements, std::int64_t group_elements) {
  return {static_cast<lmkv::Element>(element), static_cast<lmkv::Code>(code), plane_elements, group_elements};
}

const lmkv::CodecKernels& codec(bool portable) { return portable ? lmkv::portable_codec() : lmkv::best_codec(); }

std::int64_t encoded_bytes(int element, int code, std::int64_t plane_elements, std::int64_t group_elements,
                           std::int64_t count) {
  return lmkv::encoded_bytes(codec_format(element, code, plane_elements, group_elements), count);
}

bool encode(int element, int code, std::int64_t plane_elements, std::int64_t group_elements,
            const ReadOnlyPoolBytes& chunk, const PoolBytes& encoded, bool portable) {
  nb::gil_scoped_release unlocked;
  const auto format = codec_format(element, code, plane_elements, group_elements);
  const auto count = static_cast<std::int64_t>(chunk.size()) / lmkv::element_bytes(format.element);
  return codec(portable).encode(format, reinterpret_cast<const std::byte*>(chunk.data()), count,
                                reinterpret_cast<std::byte*>(encoded.data()));
}

void decode(int element, int code, std::int64_t plane_elements, std::int64_t group_elements,
            const ReadOnlyPoolBytes& encoded, const PoolBytes& chunk, bool portable) {
  nb::gil_scoped_release unlocked;
  const auto format = codec_format(element, code, plane_elements, group_elements);
  const auto count = static_cast<std::int64_t>(chunk.size()) / lmkv::element_bytes(format.element);
  codec(portable).decode(format, reinterpret_cast<const std::byte*>(encoded.data()), count,
                         reinterpret_cast<std::byte*>(chunk.data()));
}

void split(int element, const ReadOnlyPoolBytes& chunk, const PoolBytes& planes, bool portable) {
  nb::gil_scoped_release unlocked;
  const auto kind = static_cast<lmkv::Element>(element);
  const auto count = static_cast<std::int64_t>(chunk.size()) / lmkv::element_bytes(kind);
  codec(portable).split(kind, reinterpret_cast<const std::byte*>(chunk.data()), count,
                        reinterpret_cast<std::byte*>(planes.data()));
}

void join(int element, const ReadOnlyPoolBytes& planes, const PoolBytes& chunk, bool portable) {
  nb::gil_scoped_release unlocked;
  const auto kind = static_cast<lmkv::Element>(element);
  const auto count = static_cast<std::int64_t>(chunk.size()) / lmkv::element_bytes(kind);
  codec(portable).join(kind, reinterpret_cast<const std::byte*>(planes.data()), count,
                       reinterpret_cast<std::byte*>(chunk.data()));
}

void differences(int number, const Vector<const float>& table, const ReadOnlyPoolBytes& pool, std::size_t fresh,
                 std::size_t held, std::size_t layer_stride, std::int64_t count, const Vector<double>& found,
                 bool portable) {
  nb::gil_scoped_release unlocked;
  const lmkv::Differ differ = portable ? lmkv::portable_difference : lmkv::best_differ();
  const auto* bytes = reinterpret_cast<const std::byte*>(pool.data());
  for (std::size_t layer = 0; layer < found.size() / 2; ++layer) {
    const auto [mean, most] = differ(static_cast<lmkv::Number>(number), table.data(), bytes + fresh + layer * layer_stride,
                                     bytes + held + layer * layer_stride, count);
    found.data()[2 * layer] = mean;
    found.data()[2 * layer + 1] = most;
  }
}

}  // namespace

NB_MODULE(_host, module) {
  module.doc() = "Host kernels; call them through lmkv_kernels, which checks the arguments.";
  module.def("isa", [] { return std::string(lmkv::best_kernels().isa); });
  module.def("gather", &gather, "layer_addresses"_a, "geometry"_a, "pool"_a, "copies"_a, "block_ids"_a, "checksums"_a,
             "threads"_a, "portable"_a = false);
  module.def("scatter", &scatter, "layer_addresses"_a, "geometry"_a, "pool"_a, "copies"_a, "block_ids"_a, "threads"_a,
             "portable"_a = false);
  module.def("checksum", &checksum, "pool"_a, "offset"_a, "size_bytes"_a, "threads"_a, "portable"_a = false);
  module.def("summed_copy", &summed_copy, "target"_a, "source"_a, "size_bytes"_a, "first_word"_a,
             "portable"_a = false);
  module.def("chunk_keys", &chunk_keys, "tokens"_a, "root"_a, "chunk_size"_a, "portable"_a = false);
  module.def("token_ids", &token_ids, "json"_a);
  nb::class_<lmkv::JsonScan>(module, "JsonScan")
      .def(nb::init<std::size_t>(), "max_fields"_a)
      .def("add", &add_part, "part"_a)
      .def_prop_ro("fields", &fields_of)
      .def_prop_ro("is_object", &lmkv::JsonScan::is_object)
      .def_ro("size", &lmkv::JsonScan::size)
      .def_ro("commas", &lmkv::JsonScan::commas)
      .def_ro("opened", &lmkv::JsonScan::opened)
      .def_ro("texts", &lmkv::JsonScan::texts)
      .def_ro("colons", &lmkv::JsonScan::colons)
      .def_ro("is_ascii", &lmkv::JsonScan::is_ascii)
      .def_ro("has_more_fields", &lmkv::JsonScan::has_more_fields);
  module.def("differences", &differences, "number"_a, "table"_a, "pool"_a, "fresh"_a, "held"_a, "layer_stride"_a, "count"_a,
             "found"_a, "portable"_a = false);
  module.def("codec_isa", [] { return std::string(lmkv::best_codec().isa); });
  module.def("encoded_bytes", &encoded_bytes, "element"_a, "code"_a, "plane_elements"_a, "group_elements"_a, "count"_a);
  module.def("encode", &encode, "element"_a, "code"_a, "plane_elements"_a, "group_elements"_a, "chunk"_a, "encoded"_a,
             "portable"_a = false);
  module.def("decode", &decode, "element"_a, "code"_a, "plane_elements"_a, "group_elements"_a, "encoded"_a, "chunk"_a,
             "portable"_a = false);
  module.def("split", &split, "element"_a, "chunk"_a, "planes"_a, "portable"_a = false);
  module.def("join", &join, "element"_a, "planes"_a, "chunk"_a, "portable"_a = false);
}
