#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>

/// @file
/// The three parallel lists that name parameters in vLLM's update request and in the native init
/// call: names, dtypes, shapes.

namespace weightwire::wire {

/// The most parameters of one message, and the most bytes of a name.
inline constexpr std::size_t most_parameters = std::size_t{1} << 19U;
inline constexpr std::size_t longest_parameter_name = 4096;

/// How a list spells dtypes.
enum class dtype_spelling : std::uint8_t {
    ours,   ///< `to_string(dtype)`: the native wire
    torch,  ///< attributes of the torch module, its aliases too: vLLM
};

namespace detail {

struct torch_alias {
    std::string_view name;
    dtype value;
};
/// Second names in the torch module; nobody should send them, but vLLM takes them.
inline constexpr std::array<torch_alias, 8> torch_aliases{{{"half", dtype::f16},
                                                           {"float", dtype::f32},
                                                           {"double", dtype::f64},
                                                           {"short", dtype::i16},
                                                           {"int", dtype::i32},
                                                           {"long", dtype::i64},
                                                           {"cfloat", dtype::complex64},
                                                           {"cdouble", dtype::complex128}}};

[[nodiscard]] constexpr std::optional<dtype> dtype_from_list(std::string_view text,
                                                             dtype_spelling spelling) noexcept {
    if (spelling == dtype_spelling::ours) {
        return dtype_from_string(text);
    }
    for (const auto& alias : torch_aliases) {
        if (alias.name == text) {
            return alias.value;
        }
    }
    return dtype_from_torch(text);
}

/// A name is a line of the text that the manifest hash is made of, so it must not hold one's end.
[[nodiscard]] constexpr bool has_control_character(std::string_view name) noexcept {
    for (const char c : name) {
        if (static_cast<unsigned char>(c) < 0x20U || c == '\x7F') {
            return true;
        }
    }
    return false;
}

[[nodiscard]] inline std::string read_name(const json_value& value) {
    const auto name = value.string(longest_parameter_name);
    if (name.empty() || has_control_character(name)) {
        value.fail("a name is empty or holds a control character");
    }
    return std::string{name};
}

/// Refuses here what the other side would refuse.
/// @throws data_error
inline void require_name(std::string_view name) {
    if (name.empty() || name.size() > longest_parameter_name || has_control_character(name)) {
        throw data_error{"a name for the wire is empty, longer than " +
                             std::to_string(longest_parameter_name) +
                             " bytes or holds a control character; rename it",
                         {.tensor = std::string{name.substr(0, longest_parameter_name)}}};
    }
}

[[nodiscard]] inline shape read_shape(const json_value& value) {
    std::array<std::int64_t, max_dimensions> extents{};
    std::size_t rank = 0;
    for (const auto extent : value.items()) {
        if (rank == max_dimensions) {
            value.fail("a shape has more than " + std::to_string(max_dimensions) + " dimensions");
        }
        extents[rank++] = extent.integer(0, std::numeric_limits<std::int64_t>::max());
    }
    return shape{std::span<const std::int64_t>{extents.data(), rank}};
}

}  // namespace detail

/// Checks that the lists are lists of one length.
/// @throws protocol_error in vLLM's words: "`shapes` should be of the same size as `names`: got 3
/// and 4".
inline void require_equal_lists(const json_value& object, std::string_view list,
                                std::size_t name_count) {
    const auto found = object.at(list).count();
    if (found != name_count) {
        object.fail("`" + std::string{list} + "` should be of the same size as `names`: got " +
                    std::to_string(found) + " and " + std::to_string(name_count));
    }
}

/// Reads `names`, `shapes` and the list called `dtypes` of `object`.
/// @throws protocol_error naming the entry: another type, lists of unequal length, a name that is
/// empty, repeated or too long, an unknown dtype, a shape that is negative or overflows.
[[nodiscard]] inline manifest read_parameter_lists(const json_value& object,
                                                   std::string_view dtypes, dtype_spelling spelling,
                                                   std::string set_name = "model") {
    const auto count = object.at("names").count();
    if (count > most_parameters) {
        object.at("names").fail("more than " + std::to_string(most_parameters) + " parameters");
    }
    require_equal_lists(object, dtypes, count);
    require_equal_lists(object, "shapes", count);
    std::vector<param_meta> parameters;
    parameters.reserve(count);
    for (const auto name : object.at("names").items()) {
        parameters.push_back({.name = detail::read_name(name)});
    }
    std::size_t i = 0;
    std::string_view last_text;  // neighbours mostly have one dtype
    std::optional<dtype> last;
    for (const auto type : object.at(dtypes).items()) {
        const auto text = type.string();
        if (!last || text != last_text) {
            last = detail::dtype_from_list(text, spelling);
            last_text = text;
        }
        if (!last) {
            type.fail("unknown dtype " + detail::quoted_for_message(text));
        }
        parameters[i++].dtype = *last;
    }
    i = 0;
    for (const auto extents : object.at("shapes").items()) {
        parameters[i].shape = detail::read_shape(extents);
        if (!checked_byte_size(parameters[i].dtype, parameters[i].shape)) {
            extents.fail("the size of " + to_string(parameters[i].shape) + " in " +
                         std::string{to_string(parameters[i].dtype)} +
                         " is no whole number of bytes below 2^64");
        }
        ++i;
    }
    try {
        return manifest{std::move(parameters), std::move(set_name)};
    } catch (const data_error& cause) {
        object.fail(cause.what());
    }
}

/// Writes the members `names`, `shapes` and the list called `dtypes`.
/// @throws data_error a name that the other side would refuse; names the tensor.
inline void write_parameter_lists(json_writer& out, const manifest& parameters,
                                  std::string_view dtypes) {
    out.key("names").begin_array();
    for (const auto& parameter : parameters.parameters()) {
        detail::require_name(parameter.name);
        out.string(parameter.name);
    }
    out.end_array().key(dtypes).begin_array();
    for (const auto& parameter : parameters.parameters()) {
        out.string(to_string(parameter.dtype));
    }
    out.end_array().key("shapes").begin_array();
    for (const auto& parameter : parameters.parameters()) {
        out.begin_array();
        for (const auto extent : parameter.shape) {
            out.integer(extent);
        }
        out.end_array();
    }
    out.end_array();
}

}  // namespace weightwire::wire
