#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <fmt/core.h>

// fmt before 12.2 does not compile in a C++20 translation unit of nvcc.
#if defined(__CUDACC__) && FMT_VERSION < 120200
#error "weightwire/fmt.hpp: in a .cu file fmt 12.2 or newer is needed; include it from a .cpp file"
#endif

#include <fmt/format.h>

#include <weightwire/concepts/http_client.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/plan/pull_reads.hpp>
#include <weightwire/plan/regions.hpp>

/// @file
/// fmt formatters for the public types, opt-in. Each prints what messages print, and takes width,
/// alignment and precision as a string does: `fmt::print("{:>12}", tensor.type())`.

namespace weightwire {

/// A number of bytes, to be printed in units of 1000: `61.1 GB`.
struct bytes {
    std::uint64_t count = 0;
};

/// `17 B`, `2.80 MB`, `61.1 GB`: three significant digits.
[[nodiscard]] inline std::string to_string(bytes value) {
    if (value.count < 1000) {
        return std::to_string(value.count) + " B";
    }
    constexpr std::string_view units = "kMGTPE";
    auto scaled = static_cast<double>(value.count) / 1000.0;
    std::size_t unit = 0;
    for (; scaled >= 999.5 && unit + 1 < units.size(); ++unit) {
        scaled /= 1000.0;
    }
    const int decimals = scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0;
    return fmt::format("{:.{}f} {}B", scaled, decimals, units[unit]);
}

/// `cpu`, `cuda:1`, as torch spells them.
[[nodiscard]] inline std::string to_string(const device& value) {
    return value.kind == memory_kind::host ? "cpu" : "cuda:" + std::to_string(value.index);
}

/// `bfloat16[2048, 768]`.
template <class Byte>
[[nodiscard]] std::string to_string(const basic_tensor_view<Byte>& value) {
    auto out = std::string{to_string(value.type())} + to_string(value.extents());
    if (!value.is_contiguous()) {
        out += " strided";
    }
    return value.device() == device{} ? out : out + " on " + to_string(value.device());
}

/// `model.norm.weight bfloat16[2048]`.
[[nodiscard]] inline std::string to_string(const param_meta& value) {
    return value.name + " " + std::string{to_string(value.dtype)} + to_string(value.shape);
}

/// `model.norm.weight bfloat16[2048]`.
[[nodiscard]] inline std::string to_string(const named_tensor& value) {
    return std::string{value.name} + " " + to_string(value.tensor);
}

/// The sentence of an error, with its context.
[[nodiscard]] inline std::string_view to_string(const error& value) noexcept {
    return value.what();
}

namespace plan {

/// `#3 at 128: 4 x 6, 2 x 1`: of parameter 3 of the checkpoint, from element 128 on, 4 pairs that
/// are 6 elements apart, of 2 elements side by side. `#3 at 128` is one element.
[[nodiscard]] inline std::string to_string(const pull_read& value) {
    auto out = fmt::format("#{} at {}", value.source, value.offset);
    for (std::size_t d = 0; d < value.dimensions.size(); ++d) {
        const auto& [extent, stride] = value.dimensions[d];
        out += fmt::format("{} {} x {}", d == 0 ? ":" : ",", extent, stride);
    }
    return out;
}

/// `#3 at 128 -> #5 at 0: 4 x 6 -> 2, 2 x 1 -> 1`: as a read, and where it goes in parameter 5 of
/// the worker. `nothing -> #5 at 0: 4 x 1` is what nothing is copied to.
[[nodiscard]] inline std::string to_string(const region& value) {
    const bool copied = value.source != region::no_source;
    auto out = copied ? fmt::format("#{} at {}", value.source, value.source_offset) : "nothing";
    out += fmt::format(" -> #{} at {}", value.destination, value.destination_offset);
    for (std::size_t d = 0; d < value.dimensions.size(); ++d) {
        const auto& [extent, from, to] = value.dimensions[d];
        out += fmt::format("{} {} x ", d == 0 ? ":" : ",", extent);
        out += copied ? fmt::format("{} -> {}", from, to) : fmt::format("{}", to);
    }
    return out;
}

/// The read, and in brackets the regions that are made of it.
[[nodiscard]] inline std::string to_string(const read_task& value) {
    auto out = to_string(value.read) + " [";
    for (std::size_t w = 0; w < value.writes.size(); ++w) {
        out += (w == 0 ? "" : "; ") + to_string(value.writes[w]);
    }
    return out + "]";
}

}  // namespace plan

namespace detail {

/// Prints what the type's `to_string` gives, as a string.
template <class T>
struct to_string_formatter : fmt::formatter<fmt::string_view> {
    template <class Context>
    auto format(const T& value, Context& context) const {
        const auto& text = to_string(value);
        return fmt::formatter<fmt::string_view>::format(fmt::string_view{text.data(), text.size()},
                                                        context);
    }
};

}  // namespace detail

}  // namespace weightwire

/// @cond  Doxygen does not know fmt's primary template.
template <>
struct fmt::formatter<weightwire::dtype>
    : weightwire::detail::to_string_formatter<weightwire::dtype> {};
template <>
struct fmt::formatter<weightwire::shape>
    : weightwire::detail::to_string_formatter<weightwire::shape> {};
template <>
struct fmt::formatter<weightwire::device>
    : weightwire::detail::to_string_formatter<weightwire::device> {};
template <>
struct fmt::formatter<weightwire::phase>
    : weightwire::detail::to_string_formatter<weightwire::phase> {};
template <>
struct fmt::formatter<weightwire::reply_fault>
    : weightwire::detail::to_string_formatter<weightwire::reply_fault> {};
template <>
struct fmt::formatter<weightwire::commit_mode>
    : weightwire::detail::to_string_formatter<weightwire::commit_mode> {};
template <>
struct fmt::formatter<weightwire::param_meta>
    : weightwire::detail::to_string_formatter<weightwire::param_meta> {};
template <>
struct fmt::formatter<weightwire::tensor_view>
    : weightwire::detail::to_string_formatter<weightwire::tensor_view> {};
template <>
struct fmt::formatter<weightwire::mutable_tensor_view>
    : weightwire::detail::to_string_formatter<weightwire::mutable_tensor_view> {};
template <>
struct fmt::formatter<weightwire::named_tensor>
    : weightwire::detail::to_string_formatter<weightwire::named_tensor> {};
template <>
struct fmt::formatter<weightwire::bytes>
    : weightwire::detail::to_string_formatter<weightwire::bytes> {};
template <>
struct fmt::formatter<weightwire::plan::pull_read>
    : weightwire::detail::to_string_formatter<weightwire::plan::pull_read> {};
template <>
struct fmt::formatter<weightwire::plan::region>
    : weightwire::detail::to_string_formatter<weightwire::plan::region> {};
template <>
struct fmt::formatter<weightwire::plan::read_task>
    : weightwire::detail::to_string_formatter<weightwire::plan::read_task> {};
template <>
struct fmt::formatter<weightwire::error>
    : weightwire::detail::to_string_formatter<weightwire::error> {};
/// @endcond
