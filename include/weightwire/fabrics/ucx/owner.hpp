#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/ucx/owner_thread.hpp>
#include <weightwire/fabrics/ucx/texts.hpp>
#include <weightwire/fabrics/ucx/worker.hpp>

/// @file
/// A trainer rank whose memory is read over UCX.

namespace weightwire::ucx {

namespace detail {

/// `host/pid`, in letters that need no quoting.
[[nodiscard]] inline std::string name_of_this_process() {
    std::array<char, 256> host{};
    if (::gethostname(host.data(), host.size() - 1) != 0) {
        host[0] = '\0';
    }
    std::string name{host.data()};
    std::ranges::replace_if(
        name,
        [](char c) {
            return !((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                     c == '.' || c == '-' || c == '_');
        },
        '_');
    return (name.empty() ? "host" : name) + "/" + std::to_string(::getpid());
}

[[nodiscard]] inline std::uint64_t random_id() {
    std::random_device source;
    return (std::uint64_t{source()} << 32U) | source();
}

/// Memory and its registration, which ends first and on the owner's thread; both last while
/// somebody may read.
struct exported_region {
    std::shared_ptr<const void> buffer{};  ///< none where the memory is the user's
    registration registered{};
};

}  // namespace detail

/// Registered memory to which a trainer rank packs what readers take.
template <class Buffer>
class arena {
public:
    arena() noexcept = default;
    arena(std::shared_ptr<const Buffer> buffer, fabric_export exported) noexcept
        : buffer_{std::move(buffer)}, exported_{std::move(exported)} {}

    [[nodiscard]] std::byte* data() const noexcept {
        return buffer_ != nullptr ? buffer_->data() : nullptr;
    }
    [[nodiscard]] std::uint64_t size() const noexcept { return exported_.bytes; }
    [[nodiscard]] fabric_export exported() const { return exported_; }

private:
    std::shared_ptr<const Buffer> buffer_;
    fabric_export exported_{};
};

/// Lets memory be read, and answers readers on a thread of its own.
///
/// UCX has no protection over tcp: whoever reaches this process's port may read all of its memory.
/// Choose the network with `UCX_NET_DEVICES`.
template <class Staging>
class basic_owner {
public:
    using arena_type = arena<typename Staging::buffer>;

    /// @throws resource_error, unsupported_error UCX cannot start.
    explicit basic_owner(int device = 0) : staging_{device}, thread_{[this] { begin_thread(); }} {
        const auto probe = buffer_of(probe_bytes);
        for (std::uint64_t i = 0; i < probe_bytes / 8; ++i) {
            const auto word = probe_word(id_, i);
            std::memcpy(probe->data() + 8 * i, &word, 8);
        }
        address_text address{.version = library_version(),
                             .peer = detail::name_of_this_process(),
                             .id = id_,
                             .probe = address_of(probe->data())};
        thread_.run([&] {
            address.probe_key = add(probe, probe->data(), probe_bytes);
            address.worker = thread_.used_worker().address();
        });
        address_ = to_text(address);
    }

    [[nodiscard]] std::string address() const { return address_; }

    /// Registers exactly these bytes of host memory, which stay where they are until the owner has
    /// ended. Bytes inside others that were exported before are these.
    /// @throws resource_error
    [[nodiscard]] std::variant<fabric_export, fabric_refusal> export_memory(
        const std::byte* address, std::uint64_t bytes) {
        const auto begin = address_of(address);
        for (const auto& each : users_) {
            if (begin >= each.begin && begin - each.begin <= each.exported.bytes &&
                bytes <= each.exported.bytes - (begin - each.begin)) {
                auto found = each.exported;
                found.offset = begin - each.begin;
                return found;
            }
        }
        if (bytes == 0) {
            return fabric_refusal{"it has no bytes"};
        }
        if (!Staging::is_host(address)) {
            return fabric_refusal{
                "it lies on a device, whose memory this fabric does not register"};
        }
        // UCX only reads it, through the key.
        auto* const data = const_cast<std::byte*>(address);
        std::vector<std::byte> key;
        std::string refused;
        thread_.run([&] {
            try {
                key = add(nullptr, data, bytes);
            } catch (const error& failed) {
                refused = failed.what();
            }
        });
        if (!refused.empty()) {
            return fabric_refusal{"UCX does not register it: " + refused};
        }
        users_.push_back({begin, named(begin, bytes, std::move(key))});
        return users_.back().exported;
    }

    /// @throws usage_error no bytes. @throws resource_error
    [[nodiscard]] arena_type allocate(std::uint64_t bytes) { return share(buffer_of(bytes)); }

    /// Between rounds the thread answers too, but always sleeps first.
    void serve(bool active) noexcept { thread_.serve(active); }

    /// Whether UCX itself reads and writes CUDA memory.
    [[nodiscard]] bool has_cuda() {
        bool found = false;
        thread_.run([&] { found = thread_.used_context().has_cuda(); });
        return found;
    }

protected:
    using buffer = typename Staging::buffer;

    [[nodiscard]] Staging& used_staging() noexcept { return staging_; }
    /// Runs `job(context)` on the thread that answers.
    template <class Job>
    void in_thread(Job job) {
        thread_.run([&] { job(thread_.used_context()); });
    }
    /// Registers a buffer, which lasts as long as this owner.
    /// @throws resource_error
    [[nodiscard]] arena_type share(std::shared_ptr<const buffer> made) {
        auto* const data = made->data();
        const auto bytes = made->size();
        std::vector<std::byte> key;
        thread_.run([&] { key = add(made, data, bytes); });
        return arena_type{std::move(made), named(address_of(data), bytes, std::move(key))};
    }

private:
    struct user_memory {
        std::uint64_t begin = 0;
        fabric_export exported{};
    };

    [[nodiscard]] static std::uint64_t address_of(const std::byte* data) noexcept {
        return reinterpret_cast<std::uintptr_t>(data);
    }
    [[nodiscard]] std::shared_ptr<const buffer> buffer_of(std::uint64_t bytes) {
        if (bytes == 0) {
            throw usage_error{"an arena of no bytes"};
        }
        return std::make_shared<const buffer>(staging_.allocate(bytes));
    }
    void begin_thread() const {
        if constexpr (requires { staging_.begin_thread(); }) {
            staging_.begin_thread();
        }
    }
    /// On the thread.
    [[nodiscard]] std::vector<std::byte> add(std::shared_ptr<const void> holds, std::byte* data,
                                             std::uint64_t bytes) {
        auto made = std::make_shared<detail::exported_region>();
        made->buffer = std::move(holds);
        made->registered = registration::create(thread_.used_context(), data, bytes);
        auto key = made->registered.key();
        thread_.keep(std::move(made));
        return key;
    }
    [[nodiscard]] fabric_export named(std::uint64_t begin, std::uint64_t bytes,
                                      std::vector<std::byte> key) const {
        return {.handle = to_text(handle_text{
                    .id = id_, .address = begin, .bytes = bytes, .key = std::move(key)}),
                .bytes = bytes};
    }

    std::uint64_t id_ = detail::random_id();
    Staging staging_;
    std::string address_;
    std::vector<user_memory> users_;
    owner_thread thread_;
};

}  // namespace weightwire::ucx
