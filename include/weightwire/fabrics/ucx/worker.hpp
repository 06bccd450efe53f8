#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <poll.h>
#include <unistd.h>

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <ucp/api/ucp.h>

#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/ucx/status.hpp>

/// @file
/// Owners of a UCX context, of a worker in it, of memory registered with it and of the key that
/// somebody else's memory is read by.
///
/// What is used of UCX is settled by its environment, as ever: `UCX_TLS`, `UCX_NET_DEVICES`, and so
/// on. Four settings get another default here, where the environment does not name them.

namespace weightwire::ucx {

namespace detail {

/// A setting of UCX's tcp transport, without the `UCX_TCP_` that its variable begins with.
struct setting {
    const char* name;
    const char* value;
};

/// Connections are made without blocking: `connect(2)` to a machine that does not answer takes
/// minutes, whatever our deadline. A segment holds a whole piece of a read: it is faster, and
/// see `transfers::window`.
inline constexpr std::array<setting, 3> tcp_settings{
    setting{"CONN_NB", "y"}, {"TX_SEG_SIZE", "1088k"}, {"RX_SEG_SIZE", "1088k"}};

/// Frees what `ucp_config_read` made.
struct config_guard {
    ucp_config_t* config = nullptr;
    config_guard() = default;
    config_guard(const config_guard&) = delete;
    config_guard& operator=(const config_guard&) = delete;
    ~config_guard() {
        if (config != nullptr) {
            ucp_config_release(config);
        }
    }
};

}  // namespace detail

/// Release of the UCX that this process runs.
struct release {
    unsigned major = 0;
    unsigned minor = 0;
    friend auto operator<=>(const release&, const release&) noexcept = default;
};
[[nodiscard]] inline release library_release() noexcept {
    release found;
    unsigned patch = 0;
    ucp_get_version(&found.major, &found.minor, &patch);
    return found;
}
/// `major.minor` of it.
[[nodiscard]] inline std::string library_version() {
    const auto found = library_release();
    return std::to_string(found.major) + "." + std::to_string(found.minor);
}

/// Owns a context: the networks and memory kinds that this process can use.
class context {
public:
    context() noexcept = default;

    /// @param answers readers: then UCX does not look by itself whether they are there. Where it
    /// finds one gone whose request is still to be answered, the answer ends the process (1.13).
    /// @throws resource_error, unsupported_error UCX finds nothing that it can use.
    [[nodiscard]] static context create(bool answers = false) {
        detail::config_guard read;
        require_ok(ucp_config_read(nullptr, nullptr, &read.config), "ucp_config_read",
                   "a variable UCX_... of the environment has a value that UCX does not know");
        // `ucp_config_modify` takes a transport's settings with its prefix from this release on.
        const std::string prefix{library_release() < release{1, 17} ? "" : "TCP_"};
        const auto free = [](const char* name) {
            return std::getenv((std::string{"UCX_TCP_"} + name).c_str()) == nullptr;
        };
        // One size of segments alone may be refused beside the user's other one.
        const bool free_segments = free("TX_SEG_SIZE") && free("RX_SEG_SIZE");
        for (const auto& [name, value] : detail::tcp_settings) {
            const std::string plain{name};
            if (plain.ends_with("SEG_SIZE") ? free_segments : free(name)) {
                require_ok(ucp_config_modify(read.config, (prefix + plain).c_str(), value),
                           "ucp_config_modify",
                           "this release of UCX has no setting UCX_TCP_" + plain);
            }
        }
        if (answers && std::getenv("UCX_KEEPALIVE_INTERVAL") == nullptr) {
            require_ok(ucp_config_modify(read.config, "KEEPALIVE_INTERVAL", "inf"),
                       "ucp_config_modify",
                       "this release of UCX has no setting UCX_KEEPALIVE_INTERVAL");
        }
        ucp_params_t wanted{};
        wanted.field_mask = UCP_PARAM_FIELD_FEATURES;
        wanted.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
        context made;
        require_ok(ucp_init(&wanted, read.config, &made.native_), "ucp_init",
                   "UCX cannot start; look at UCX_TLS and UCX_NET_DEVICES, and at what `ucx_info "
                   "-d` lists");
        return made;
    }
    context(context&& other) noexcept : native_{std::exchange(other.native_, nullptr)} {}
    context& operator=(context&& other) noexcept {
        std::swap(native_, other.native_);
        return *this;
    }
    ~context() {
        if (native_ != nullptr) {
            ucp_cleanup(native_);
        }
    }

    [[nodiscard]] ucp_context_h native_handle() const noexcept { return native_; }
    /// Whether UCX itself reads and writes CUDA memory. Debian's and Ubuntu's packages do not.
    [[nodiscard]] bool has_cuda() const noexcept {
        ucp_context_attr_t found{};
        found.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
        constexpr auto cuda = std::uint64_t{1} << UCS_MEMORY_TYPE_CUDA;
        return ucp_context_query(native_, &found) == UCS_OK && (found.memory_types & cuda) != 0;
    }

private:
    ucp_context_h native_ = nullptr;
};

/// Owns a worker: queues that one thread at a time drives.
class worker {
public:
    worker() noexcept = default;

    /// @param all one thread makes, uses and ends it; else one at a time.
    /// @throws resource_error, unsupported_error
    [[nodiscard]] static worker create(const context& in, ucs_thread_mode_t all) {
        ucp_worker_params_t wanted{};
        wanted.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
        wanted.thread_mode = all;
        worker made;
        require_ok(ucp_worker_create(in.native_handle(), &wanted, &made.native_),
                   "ucp_worker_create",
                   "UCX cannot open its devices; look at UCX_NET_DEVICES and at the limits of open "
                   "files and of locked memory");
        require_ok(ucp_worker_get_efd(made.native_, &made.event_), "ucp_worker_get_efd",
                   "none of the transports that UCX chose can wake a thread; look at UCX_TLS");
        return made;
    }
    worker(worker&& other) noexcept
        : native_{std::exchange(other.native_, nullptr)}, event_{std::exchange(other.event_, -1)} {}
    worker& operator=(worker&& other) noexcept {
        std::swap(native_, other.native_);
        std::swap(event_, other.event_);
        return *this;
    }
    ~worker() { close(); }

    /// Gives up all that is in flight. Waits for no peer.
    void close() noexcept {
        if (native_ != nullptr) {
            ucp_worker_destroy(std::exchange(native_, nullptr));
        }
    }
    [[nodiscard]] ucp_worker_h native_handle() const noexcept { return native_; }
    [[nodiscard]] explicit operator bool() const noexcept { return native_ != nullptr; }

    /// Does what there is to do; whether there was anything.
    bool progress() const noexcept { return ucp_worker_progress(native_) != 0; }

    /// Sleeps until there is something to do, at most `milliseconds`, or until `also` is readable.
    void sleep(int milliseconds, int also = -1) const noexcept {
        const auto armed = ucp_worker_arm(native_);
        if (armed == UCS_ERR_BUSY) {
            return;  // something came meanwhile
        }
        // A worker that cannot be armed is looked after every millisecond.
        std::array<pollfd, 2> events{pollfd{.fd = event_, .events = POLLIN, .revents = 0},
                                     pollfd{.fd = also, .events = POLLIN, .revents = 0}};
        static_cast<void>(::poll(events.data(), events.size(), armed == UCS_OK ? milliseconds : 1));
    }

    /// The bytes by which another process connects.
    /// @throws resource_error
    [[nodiscard]] std::vector<std::byte> address() const {
        ucp_address_t* bytes = nullptr;
        std::size_t size = 0;
        require_ok(ucp_worker_get_address(native_, &bytes, &size), "ucp_worker_get_address",
                   "UCX gives no address of this process");
        const auto* const first = reinterpret_cast<const std::byte*>(bytes);
        std::vector<std::byte> copy(first, first + size);
        ucp_worker_release_address(native_, bytes);
        return copy;
    }

private:
    ucp_worker_h native_ = nullptr;
    int event_ = -1;
};

/// Owns the registration of memory of this process, not the memory. Ends before the context does,
/// and before the memory.
class registration {
public:
    registration() noexcept = default;

    /// @param type of the memory; unknown: UCX looks itself.
    /// @throws resource_error, unsupported_error
    [[nodiscard]] static registration create(const context& in, std::byte* data,
                                             std::uint64_t bytes,
                                             ucs_memory_type_t type = UCS_MEMORY_TYPE_UNKNOWN) {
        ucp_mem_map_params_t wanted{};
        wanted.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
        wanted.address = data;
        wanted.length = static_cast<std::size_t>(bytes);
        if (type != UCS_MEMORY_TYPE_UNKNOWN) {
            wanted.field_mask |= UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
            wanted.memory_type = type;
        }
        registration made;
        made.context_ = in.native_handle();
        error_context where{.bytes_total = bytes};
        require_ok(ucp_mem_map(made.context_, &wanted, &made.native_), "ucp_mem_map",
                   "UCX cannot register this memory; raise the limit of locked memory (ulimit -l)",
                   std::move(where));
        return made;
    }
    registration(registration&& other) noexcept
        : context_{other.context_}, native_{std::exchange(other.native_, nullptr)} {}
    registration& operator=(registration&& other) noexcept {
        std::swap(context_, other.context_);
        std::swap(native_, other.native_);
        return *this;
    }
    ~registration() {
        if (native_ != nullptr) {
            static_cast<void>(ucp_mem_unmap(context_, native_));
        }
    }

    [[nodiscard]] ucp_mem_h native_handle() const noexcept { return native_; }
    /// The bytes of the key by which another process reads the memory.
    /// @throws resource_error
    [[nodiscard]] std::vector<std::byte> key() const {
        void* bytes = nullptr;
        std::size_t size = 0;
        require_ok(ucp_rkey_pack(context_, native_, &bytes, &size), "ucp_rkey_pack",
                   "UCX gives no key of this memory");
        const auto* const first = static_cast<const std::byte*>(bytes);
        std::vector<std::byte> copy(first, first + size);
        ucp_rkey_buffer_release(bytes);
        return copy;
    }

private:
    ucp_context_h context_ = nullptr;
    ucp_mem_h native_ = nullptr;
};

/// Owns the key of somebody else's memory. Ends before the context does.
class remote_key {
public:
    remote_key() noexcept = default;

    /// @param packed comes from the other side. UCX does not check it.
    /// @throws unsupported_error, peer_error, resource_error
    [[nodiscard]] static remote_key create(ucp_ep_h through, const std::vector<std::byte>& packed,
                                           error_context where) {
        remote_key made;
        require_ok(ucp_ep_rkey_unpack(through, packed.data(), &made.native_), "ucp_ep_rkey_unpack",
                   "the trainer rank's memory cannot be reached by any transport that both sides "
                   "have; set UCX_TLS alike",
                   std::move(where));
        return made;
    }
    remote_key(remote_key&& other) noexcept : native_{std::exchange(other.native_, nullptr)} {}
    remote_key& operator=(remote_key&& other) noexcept {
        std::swap(native_, other.native_);
        return *this;
    }
    ~remote_key() {
        if (native_ != nullptr) {
            ucp_rkey_destroy(native_);
        }
    }
    [[nodiscard]] ucp_rkey_h native_handle() const noexcept { return native_; }

private:
    ucp_rkey_h native_ = nullptr;
};

}  // namespace weightwire::ucx
