#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

/// What the tests of sinks share.
namespace sink_test {

inline weightwire::deadline soon() { return weightwire::deadline::after(std::chrono::seconds{20}); }

/// Bytes that differ for every seed, name and position.
inline std::vector<std::byte> pattern(std::uint64_t seed, std::string_view name, std::size_t size) {
    std::uint64_t key = seed * 0x9E3779B97F4A7C15U;
    for (const char c : name) {
        key = (key ^ static_cast<unsigned char>(c)) * 0x100000001B3U;
    }
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < size; ++i) {
        key = weightwire::detail::digest_term(i, key);
        bytes[i] = static_cast<std::byte>(key >> 24U);
    }
    return bytes;
}

/// The elements of a tensor of any strides, in C order.
inline std::vector<std::byte> bytes_of(const weightwire::tensor_view& tensor) {
    std::vector<std::byte> bytes(tensor.byte_size());
    weightwire::copy_tensor({bytes.data(), tensor.type(), tensor.extents()}, tensor);
    return bytes;
}

/// Writes the pattern of `seed` to every destination that is to be placed.
inline void fill(std::span<const weightwire::destination> destinations,
                 const weightwire::manifest& parameters, std::uint64_t seed) {
    for (std::size_t i = 0; i < destinations.size(); ++i) {
        const auto& parameter = parameters[i];
        if (destinations[i].kind == weightwire::destination::kind_type::place) {
            const auto bytes = pattern(seed, parameter.name, parameter.byte_size());
            weightwire::copy_tensor(destinations[i].where,
                                    {bytes.data(), parameter.dtype, parameter.shape});
        }
    }
}

/// Whether readers see version `seed` with its pattern.
template <class Table>
bool holds(Table& table, std::uint64_t seed) {
    const auto held = table.acquire();
    for (std::size_t i = 0; i < held.size(); ++i) {
        if (held.version() != seed ||
            bytes_of(held.tensor(i)) != pattern(seed, held.name(i), held.tensor(i).byte_size())) {
            return false;
        }
    }
    return true;
}

/// A session that names every parameter of the sink, up to the commit.
template <class Sink>
void prepare(Sink& sink, weightwire::weight_version version) {
    const auto& parameters = sink.parameters();
    fill(sink.begin({.epoch = 1, .session = version, .version = version}, parameters, soon()),
         parameters, version);
    sink.prepare(soon());
}

/// A whole session that names every parameter of the sink. Every second one exchanges first, where
/// the sink does that.
template <class Sink>
void update(Sink& sink, weightwire::weight_version version) {
    prepare(sink, version);
    if constexpr (weightwire::HasExchange<Sink>) {
        if (version % 2 == 0) {
            sink.exchange(soon(), {});
        }
    }
    sink.commit(version);
}

}  // namespace sink_test
