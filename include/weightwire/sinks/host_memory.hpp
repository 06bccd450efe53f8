#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sinks/copy_rate.hpp>
#include <weightwire/sinks/exchange_pace.hpp>
#include <weightwire/sinks/host_storage.hpp>
#include <weightwire/sinks/placed_parameters.hpp>
#include <weightwire/sinks/table_memory.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

/// @file
/// The memory of a table whose parameters the processor reads.

namespace weightwire {

/// Host memory. Models `TableMemory`; has no state. Nothing in it fails once it is allocated.
class host_memory {
public:
    using storage = host_storage;

    [[nodiscard]] weightwire::device where() const noexcept { return {}; }

    /// @copydoc host_storage::host_storage(std::uint64_t,std::string_view)
    [[nodiscard]] storage allocate(std::uint64_t bytes, std::string_view purpose) const {
        return host_storage{bytes, purpose};
    }

    /// @throws unsupported_error `from` is on a device.
    void require_loadable(const named_tensor& from) const {
        if (from.tensor.device().kind != memory_kind::host) {
            throw unsupported_error{"a parameter table loads from host memory only",
                                    {.phase = phase::init, .tensor = std::string{from.name}}};
        }
    }
    void load(const mutable_tensor_view& to, const named_tensor& from) const noexcept {
        copy_tensor(to, from.tensor);
    }

    /// Runs are found again at each walk: that costs less than reading a list of them.
    void plan(const detail::placed_parameters& /*placed*/) const noexcept {}

    /// A copy over the same memory and strides, the other way, into staging whose content does not
    /// matter yet: readers may be looking at the live weights. An exchange, which reads and writes
    /// both sides, costs about two. Large enough to tell, and no second of a large model.
    [[nodiscard]] detail::timed_copy sample(
        const detail::placed_parameters& placed) const noexcept {
        constexpr std::uint64_t enough = std::uint64_t{32} << 20U;
        auto copied = detail::timed([&] {
            std::uint64_t bytes = 0;
            placed.all([&](const detail::parameter_slots& slots) {
                copy_tensor(slots[1], slots[0]);
                bytes += slots[0].byte_size();
                return bytes < enough;
            });
            return bytes;
        });
        copied.took *= 2;
        return copied;
    }

    [[nodiscard]] bool exchange(const detail::placed_parameters& placed,
                                detail::exchange_pace& pace) const noexcept {
        return exchange_while(placed, std::ref(pace));
    }
    [[nodiscard]] bool exchange_back(const detail::placed_parameters& placed,
                                     std::uint64_t bytes) const noexcept {
        exchange_while(placed, detail::first_bytes{bytes});
        return true;
    }
    /// A copy: two thirds of what an exchange costs.
    [[nodiscard]] bool publish(const detail::placed_parameters& placed) const noexcept {
        return placed.all([](const detail::parameter_slots& slots) {
            copy_tensor(slots[0], slots[1]);
            return true;
        });
    }

private:
    template <class GoOn>
    static bool exchange_while(const detail::placed_parameters& placed, GoOn go_on) noexcept {
        return placed.all([&](const detail::parameter_slots& slots) {
            return exchange_tensors(slots[0], slots[1], go_on);
        });
    }
};

static_assert(TableMemory<host_memory>);

}  // namespace weightwire
