// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <weightwire/fabrics/shared_memory_copy.hpp>

namespace {

namespace shm = weightwire::shm;
using bytes = std::vector<std::byte>;

bytes random_bytes(std::size_t count, std::uint64_t seed) {
    std::mt19937_64 random{seed};
    bytes result(count);
    for (auto& each : result) {
        each = static_cast<std::byte>(random());
    }
    return result;
}

/// Whether `copy(to, from, count)` copies exactly that, at these distances from an aligned address.
template <class Copy>
bool copies_exactly(Copy copy, const bytes& from, std::size_t from_at, std::size_t to_at,
                    std::size_t count) {
    bytes to(to_at + count + 128, std::byte{0xA5});
    const auto begin = (64 - reinterpret_cast<std::uintptr_t>(to.data()) % 64) % 64 + to_at;
    copy(to.data() + begin, from.data() + from_at, count);
    for (std::size_t i = 0; i < to.size(); ++i) {
        const bool inside = i >= begin && i < begin + count;
        if (to[i] != (inside ? from[from_at + i - begin] : std::byte{0xA5})) {
            return false;
        }
    }
    return true;
}

const std::array<std::size_t, 20> sizes{0,    1,    7,    63,   64,   65,   255,  256,  1023, 1024,
                                        1025, 1087, 1088, 1279, 1280, 2048, 4095, 4096, 5000, 9999};

/// Element by element, in C order: what the fast copies must equal.
bytes packed(const weightwire::tensor_view& tensor) {
    const auto item = weightwire::item_bits(tensor.type()) / 8;
    bytes result;
    std::array<std::int64_t, weightwire::max_dimensions> index{};
    for (std::uint64_t left = tensor.byte_size() / item; left > 0; --left) {
        std::int64_t distance = 0;
        for (std::size_t i = 0; i < tensor.extents().size(); ++i) {
            distance += index[i] * tensor.strides()[i];
        }
        const auto* const at = tensor.data() + distance * static_cast<std::int64_t>(item);
        result.insert(result.end(), at, at + item);
        for (std::size_t i = tensor.extents().size(); i-- > 0;) {
            if (++index[i] < tensor.extents()[i]) {
                break;
            }
            index[i] = 0;
        }
    }
    return result;
}

/// A random view into `storage`: permuted, gapped, reversed or broadcast dimensions.
template <class Byte>
weightwire::basic_tensor_view<Byte> random_view(std::span<Byte> storage, std::mt19937_64& random,
                                                bool may_overlap) {
    using weightwire::dtype;
    const auto below = [&](std::uint64_t end) { return static_cast<std::int64_t>(random() % end); };
    constexpr std::array types{dtype::u8, dtype::bf16, dtype::f32, dtype::f64, dtype::complex128};
    const auto type = types[static_cast<std::size_t>(below(types.size()))];
    const auto item = static_cast<std::int64_t>(weightwire::item_bits(type) / 8);
    const auto rank = static_cast<std::size_t>(below(5));
    std::array<std::int64_t, weightwire::max_dimensions> extents{};
    std::array<std::int64_t, weightwire::max_dimensions> strides{};
    std::array<std::size_t, weightwire::max_dimensions> order{};
    for (std::size_t i = 0; i < rank; ++i) {
        extents[i] = 1 + below(rank < 3 ? 40 : 9);
        order[i] = i;
    }
    std::shuffle(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(rank), random);
    std::int64_t step = 1;
    std::int64_t lowest = 0;
    for (std::size_t k = rank; k-- > 0;) {
        const auto i = order[k];
        strides[i] = step;
        step = step * extents[i] + (below(3) == 0 ? below(4) : 0);
        if (below(4) == 0) {
            strides[i] = -strides[i];
            lowest += strides[i] * (extents[i] - 1);
        } else if (may_overlap && below(6) == 0) {
            strides[i] = 0;
        }
    }
    REQUIRE(static_cast<std::size_t>(step * item) + 64 < storage.size());
    auto* const at = storage.data() + below(9) - lowest * item;
    return {at, type, weightwire::shape{std::span<const std::int64_t>{extents.data(), rank}},
            strides};
}

}  // namespace

TEST_CASE("a streaming copy copies every byte and no other, at every alignment") {
    const auto from = random_bytes(11'000, 1);
    for (const auto count : sizes) {
        for (std::size_t to_at = 0; to_at < 64; to_at += count < 300 ? 1 : 7) {
            for (const std::size_t from_at : {0U, 1U, 13U, 32U, 63U}) {
                REQUIRE(copies_exactly([](std::byte* to, const std::byte* source,
                                          std::size_t n) { shm::streaming_copy(to, source, n); },
                                       from, from_at, to_at, count));
            }
        }
    }
}

#if defined(__x86_64__)
TEST_CASE("every kernel that this processor runs copies the same") {
    const auto from = random_bytes(11'000, 2);
    std::vector<std::pair<std::string, shm::detail::stream_kernel>> kernels{
        {"sse2", &shm::detail::stream_sse2}};
    if (__builtin_cpu_supports("avx2")) {
        kernels.emplace_back("avx2", &shm::detail::stream_avx2);
    }
    if (__builtin_cpu_supports("avx512f")) {
        kernels.emplace_back("avx512", &shm::detail::stream_avx512);
    }
    for (const auto& [name, kernel] : kernels) {
        CAPTURE(name);
        for (const auto count : sizes) {
            for (const std::size_t to_at : {0U, 1U, 31U, 32U, 63U}) {
                REQUIRE(copies_exactly(
                    [used = kernel](std::byte* to, const std::byte* source, std::size_t n) {
                        shm::detail::stream_unfenced(to, source, n, used);
                        shm::detail::stream_fence();
                    },
                    from, 5, to_at, count));
            }
        }
    }
}
#endif

TEST_CASE("gather reads any strides in any pieces") {
    std::mt19937_64 random{3};
    const auto storage = random_bytes(1 << 20, 4);
    for (int i = 0; i < 400; ++i) {
        const auto tensor =
            random_view(std::span<const std::byte>{storage}, random, /*may_overlap=*/true);
        const auto expected = packed(tensor);
        bytes found(expected.size());
        for (std::size_t at = 0; at < found.size();) {
            const auto count = std::min<std::size_t>(64 * (1 + random() % 20), found.size() - at);
            shm::gather(std::span{found}.subspan(at, count), tensor, at,
                        random() % 2 == 0 ? shm::stores::cached : shm::stores::streaming);
            at += count;
        }
        REQUIRE(found == expected);
    }
}

TEST_CASE("scatter writes any strides in any pieces, and nothing between them") {
    std::mt19937_64 random{5};
    for (int i = 0; i < 400; ++i) {
        bytes storage(1 << 20, std::byte{0xA5});
        const auto tensor =
            random_view(std::span<std::byte>{storage}, random, /*may_overlap=*/false);
        auto expected = random_bytes(tensor.byte_size(), static_cast<std::uint64_t>(i) + 6);
        for (auto& each : expected) {
            each = each == std::byte{0xA5} ? std::byte{0} : each;
        }
        for (std::size_t at = 0; at < expected.size();) {
            const auto count =
                std::min<std::size_t>(64 * (1 + random() % 20), expected.size() - at);
            shm::scatter(tensor, at, std::span{expected}.subspan(at, count),
                         random() % 2 == 0 ? shm::stores::cached : shm::stores::streaming);
            at += count;
        }
        REQUIRE(packed(tensor) == expected);
        const auto untouched = std::count(storage.begin(), storage.end(), std::byte{0xA5});
        REQUIRE(static_cast<std::size_t>(untouched) == storage.size() - expected.size());
    }
}

TEST_CASE("tensors without bytes, scalars and packed 6-bit types are copied") {
    bytes storage(64);
    shm::scatter({storage.data(), weightwire::dtype::f32, {0, 3}}, 0, {}, shm::stores::streaming);
    shm::gather({}, {storage.data(), weightwire::dtype::f32, {0}}, 0, shm::stores::cached);
    const auto value = random_bytes(8, 7);
    shm::scatter({storage.data() + 3, weightwire::dtype::i64, {}}, 0, value,
                 shm::stores::streaming);
    CHECK(std::memcmp(storage.data() + 3, value.data(), 8) == 0);
    shm::scatter({storage.data(), weightwire::dtype::f6_e2m3, {4}}, 0, std::span{value}.first(3),
                 shm::stores::cached);
    CHECK(std::memcmp(storage.data(), value.data(), 3) == 0);
    const weightwire::mutable_tensor_view gaps{
        storage.data(), weightwire::dtype::f6_e2m3, {4, 4}, {8, 1}};
    CHECK_THROWS_AS(shm::scatter(gaps, 0, value, shm::stores::cached),
                    weightwire::unsupported_error);
}
