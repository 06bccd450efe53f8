#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/backends/cuda_ipc/machinery.hpp>
#include <weightwire/core/convert.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/shared_memory.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

/// @file
/// The machinery of `cuda_ipc` without a GPU: streams are threads, and memory that a view calls a
/// device's is shared host memory, whose handles other processes can open as they open CUDA's.

namespace tests {

/// What a test changes, in the process that it is in. Set before threads start.
struct host_ipc_world {
    /// Called at `export`, `open`, `launch`, `copy`, `digests` and `work` (on a stream's thread,
    /// where nothing may be thrown).
    static inline std::function<void(std::string_view step)> at_step{};
    static inline std::atomic<std::uint64_t> opened{0};   ///< allocations mapped so far
    static inline std::atomic<std::uint64_t> mapped{0};   ///< of these, not yet unmapped
    static inline std::atomic<std::uint64_t> plans{0};    ///< copy plans made so far
    static inline std::atomic<std::uint64_t> buffers{0};  ///< exportable buffers made so far
    static inline std::atomic<std::uint64_t> launches{0};
    /// While true, work given to streams does not begin.
    static inline std::atomic<bool> stuck{false};
    /// Of this process's devices, the first letter of their UUIDs: two machines differ by it.
    static inline char gpu_letter = 'a';

    static void meet(std::string_view step) {
        if (at_step) {
            at_step(step);
        }
    }
};

/// Memory of a pretended device: one allocation.
class host_allocation {
public:
    host_allocation() noexcept = default;
    /// @param refusal why no other process can open it; empty: it can.
    explicit host_allocation(std::size_t bytes, std::string refusal = {})
        : memory_{weightwire::shm::segment::create(std::max<std::size_t>(bytes, 1))}, size_{bytes} {
        auto& all = registry();
        const std::lock_guard lock{all.mutex};
        all.known[memory_.data()] = {.bytes = memory_.size(),
                                     .id = ++all.next_id,
                                     .handle = memory_.exported(),
                                     .refusal = std::move(refusal)};
    }
    host_allocation(host_allocation&& other) noexcept
        : memory_{std::move(other.memory_)}, size_{std::exchange(other.size_, 0)} {}
    host_allocation& operator=(host_allocation&& other) noexcept {
        std::swap(memory_, other.memory_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~host_allocation() {
        if (memory_.data() != nullptr) {
            auto& all = registry();
            const std::lock_guard lock{all.mutex};
            all.known.erase(memory_.data());
        }
    }
    [[nodiscard]] std::byte* data() const noexcept { return memory_.data(); }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

    struct entry {
        std::uint64_t bytes = 0;
        std::uint64_t id = 0;
        weightwire::shm::handle handle{};
        std::string refusal{};
    };
    struct registry_type {
        std::mutex mutex{};
        std::map<const std::byte*, entry> known{};
        std::uint64_t next_id = 0;
    };
    [[nodiscard]] static registry_type& registry() {
        static registry_type all;
        return all;
    }

private:
    weightwire::shm::segment memory_{};
    std::size_t size_ = 0;
};

/// The machinery.
class host_ipc_machinery {
    using byte_move = weightwire::cuda_ipc::byte_move;
    using exported = weightwire::cuda_ipc::exported_allocation;

    struct event_state {
        std::atomic<std::uint64_t> recorded{0};
        std::atomic<std::uint64_t> reached{0};
    };

    /// Runs work in order, on a thread of its own.
    class queue {
    public:
        queue() : thread_{[this](const std::stop_token& stop) { run(stop); }} {}
        ~queue() {
            thread_.request_stop();
            changed_.notify_all();
        }
        void put(std::function<void(const std::stop_token&)> work) {
            const std::lock_guard lock{mutex_};
            work_.push_back(std::move(work));
            changed_.notify_all();
        }
        [[nodiscard]] bool is_idle() {
            const std::lock_guard lock{mutex_};
            return work_.empty() && !busy_;
        }

    private:
        void run(const std::stop_token& stop) {
            std::unique_lock lock{mutex_};
            while (changed_.wait(lock, stop, [&] { return !work_.empty(); })) {
                const auto next = std::move(work_.front());
                work_.pop_front();
                busy_ = true;
                lock.unlock();
                while (host_ipc_world::stuck && !stop.stop_requested()) {
                    std::this_thread::sleep_for(std::chrono::milliseconds{1});
                }
                next(stop);
                lock.lock();
                busy_ = false;
            }
        }
        std::mutex mutex_;
        std::condition_variable_any changed_;
        bool busy_ = false;
        std::deque<std::function<void(const std::stop_token&)>> work_;
        std::jthread thread_;  // last: it uses the others
    };

public:
    static constexpr auto near_memory = weightwire::memory_kind::cuda;
    using buffer = host_allocation;
    using pinned_buffer = host_allocation;

    class stream {
    public:
        stream() : queue_{std::make_shared<queue>()} {}
        /// As a user's `ready_stream`.
        [[nodiscard]] void* native_handle() noexcept { return this; }
        void put(std::function<void()> work) const {
            queue_->put([work = std::move(work)](const std::stop_token&) { work(); });
        }

    private:
        friend class host_ipc_machinery;
        std::shared_ptr<queue> queue_;
    };
    class event {
    public:
        event() : state_{std::make_shared<event_state>()} {}

    private:
        friend class host_ipc_machinery;
        std::shared_ptr<event_state> state_;
    };
    class copy_plan {
    public:
        void launch(std::size_t group, const stream& on) const {
            ++host_ipc_world::launches;
            host_ipc_world::meet("launch");
            on.put([groups = groups_, group] {
                for (const auto& move : (*groups).at(group)) {
                    host_ipc_world::meet("work");
                    std::memcpy(move.to, move.from, move.bytes);
                }
            });
        }
        [[nodiscard]] std::size_t table_bytes() const noexcept {
            std::size_t moves = 0;
            for (const auto& group : *groups_) {
                moves += group.size();
            }
            return moves * sizeof(byte_move);
        }

    private:
        friend class host_ipc_machinery;
        std::shared_ptr<const std::vector<std::vector<byte_move>>> groups_;
    };

    class conversion_plan {
    public:
        void launch(std::size_t group, const stream& on) const {
            ++host_ipc_world::launches;
            host_ipc_world::meet("launch");
            on.put([groups = groups_, group] {
                for (const auto& each : (*groups).at(group)) {
                    host_ipc_world::meet("work");
                    const auto& to = each.to;
                    const auto& from = each.from;
                    weightwire::convert_tensor(
                        {to.data(), to.type(), to.extents(), to.strides()},
                        {from.data(), from.type(), from.extents(), from.strides()});
                }
            });
        }
        [[nodiscard]] std::size_t table_bytes() const noexcept {
            return groups_->front().size() * sizeof(weightwire::cuda_ipc::conversion);
        }

    private:
        friend class host_ipc_machinery;
        std::shared_ptr<const std::vector<std::vector<weightwire::cuda_ipc::conversion>>> groups_;
    };

    /// What was opened, shared by all who opened the same.
    class mapping {
    public:
        [[nodiscard]] const std::byte* data() const noexcept { return data_; }
        [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

    private:
        friend class host_ipc_machinery;
        const std::byte* data_ = nullptr;
        std::uint64_t size_ = 0;
        std::shared_ptr<void> kept_{};
    };

    explicit host_ipc_machinery(int device) : device_{device} {
        if (device < 0 || device > 7) {
            throw weightwire::unsupported_error{"there is no device " + std::to_string(device)};
        }
    }
    [[nodiscard]] int device() const noexcept { return device_; }
    [[nodiscard]] std::string gpu() const {
        std::string text{"00000000-0000-0000-0000-000000000000"};
        text.front() = host_ipc_world::gpu_letter;
        text.back() = static_cast<char>('0' + device_);
        return text;
    }

    [[nodiscard]] std::variant<exported, std::string> export_of(const std::byte* address,
                                                                std::size_t bytes) {
        host_ipc_world::meet("export");
        auto& all = host_allocation::registry();
        const std::lock_guard lock{all.mutex};
        const auto after = all.known.upper_bound(address);
        if (after == all.known.begin()) {
            return std::string{"it is in no allocation of a device"};
        }
        const auto& [base, found] = *std::prev(after);
        if (address + bytes > base + found.bytes) {
            return std::string{"it is in no allocation of a device"};
        }
        if (!found.refusal.empty()) {
            return found.refusal;
        }
        return exported{.handle = packed(found.handle),
                        .base = reinterpret_cast<std::uint64_t>(base),
                        .bytes = found.bytes,
                        .buffer_id = found.id};
    }
    [[nodiscard]] bool is_current(const exported& known) {
        auto& all = host_allocation::registry();
        const std::lock_guard lock{all.mutex};
        const auto now = all.known.find(reinterpret_cast<const std::byte*>(known.base));
        return now != all.known.end() && now->second.id == known.buffer_id;
    }
    [[nodiscard]] buffer allocate_exportable(std::size_t bytes) {
        ++host_ipc_world::buffers;
        return host_allocation{bytes};
    }
    [[nodiscard]] pinned_buffer allocate_pinned(std::size_t bytes) {
        return host_allocation{bytes};
    }

    [[nodiscard]] mapping open(const weightwire::cuda_ipc::exporter& from,
                               const exported& allocation) {
        host_ipc_world::meet("open");
        const auto handle = unpacked(allocation.handle);
        mapping result;
        if (from == weightwire::shm::this_process()) {
            auto& all = host_allocation::registry();
            const std::lock_guard lock{all.mutex};
            for (const auto& [base, found] : all.known) {
                if (found.id == allocation.buffer_id && packed(found.handle) == allocation.handle) {
                    result.data_ = base;
                    result.size_ = found.bytes;
                    return result;
                }
            }
            throw weightwire::peer_error{"this process has exported no such memory"};
        }
        struct held {
            explicit held(weightwire::shm::mapping opened) : memory{std::move(opened)} {
                ++host_ipc_world::mapped;
            }
            held(const held&) = delete;
            held& operator=(const held&) = delete;
            ~held() { --host_ipc_world::mapped; }
            weightwire::shm::mapping memory;
        };
        static std::mutex mutex;
        static std::map<std::string, std::weak_ptr<held>> cache;
        const std::lock_guard lock{mutex};
        auto& kept = cache[allocation.handle + std::to_string(allocation.buffer_id)];
        auto memory = kept.lock();
        if (memory == nullptr) {
            memory = std::make_shared<held>(weightwire::shm::mapping::open(
                handle, {.context = {.phase = weightwire::phase::init, .backend = "ipc"}}));
            ++host_ipc_world::opened;
            kept = memory;
        }
        result.data_ = memory->memory.data();
        result.size_ = memory->memory.size();
        result.kept_ = memory;
        return result;
    }
    /// A pretended event's first byte says whether it was reached.
    class foreign_event {
    public:
        [[nodiscard]] bool is_done() const noexcept { return reached_; }

    private:
        friend class host_ipc_machinery;
        bool reached_ = false;
    };
    [[nodiscard]] foreign_event open_foreign_event(std::span<const std::byte> handle) {
        host_ipc_world::meet("event");
        if (handle.size() != 64) {
            throw weightwire::protocol_error{"an event's handle has 64 bytes"};
        }
        foreign_event opened;
        opened.reached_ = handle.front() == std::byte{0};
        return opened;
    }

    [[nodiscard]] stream make_stream() { return {}; }
    [[nodiscard]] event make_event() { return {}; }
    void record(event& point, const stream& on) {
        const auto mark = ++point.state_->recorded;
        on.put([state = point.state_, mark] {
            // Records on several streams may come in another order than they were made.
            auto seen = state->reached.load();
            while (seen < mark && !state->reached.compare_exchange_weak(seen, mark)) {
            }
        });
    }
    void record_after(event& point, void* users) { record(point, *static_cast<stream*>(users)); }
    void make_wait(stream& later, const event& point) {
        const auto wanted = point.state_->recorded.load();
        later.queue_->put([state = point.state_, wanted](const std::stop_token& stop) {
            while (state->reached < wanted && !stop.stop_requested()) {
                std::this_thread::sleep_for(std::chrono::microseconds{50});
            }
        });
    }
    void make_source_wait(void* users, const event& point) {
        make_wait(*static_cast<stream*>(users), point);
    }
    [[nodiscard]] bool is_done(const event& point) const {
        return point.state_->reached >= point.state_->recorded;
    }

    [[nodiscard]] static bool is_idle(const stream& asked) { return asked.queue_->is_idle(); }

    void load_kernels() {}
    void copy(std::byte* to, const std::byte* from, std::size_t bytes, const stream& on) {
        host_ipc_world::meet("copy");
        on.put([to, from, bytes] { std::memcpy(to, from, bytes); });
    }
    [[nodiscard]] copy_plan make_copies(std::span<const std::vector<byte_move>> groups) {
        ++host_ipc_world::plans;
        copy_plan plan;
        plan.groups_ = std::make_shared<const std::vector<std::vector<byte_move>>>(groups.begin(),
                                                                                   groups.end());
        return plan;
    }
    [[nodiscard]] conversion_plan make_conversions(
        std::span<const std::vector<weightwire::cuda_ipc::conversion>> groups) {
        ++host_ipc_world::plans;
        conversion_plan plan;
        plan.groups_ =
            std::make_shared<const std::vector<std::vector<weightwire::cuda_ipc::conversion>>>(
                groups.begin(), groups.end());
        return plan;
    }
    void prepare_digests(std::size_t /*lists*/) {}
    void digests(std::span<const weightwire::tensor_view> tensors, std::span<std::uint64_t> results,
                 weightwire::deadline /*until*/, const std::stop_token& /*stop*/) {
        host_ipc_world::meet("digests");
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            std::vector<std::byte> bytes;
            weightwire::for_each_run(tensors[i], [&](const std::byte* at, std::size_t count) {
                bytes.insert(bytes.end(), at, at + count);
            });
            results[i] = weightwire::digest(bytes);
        }
    }

private:
    /// As long as CUDA's.
    [[nodiscard]] static std::string packed(const weightwire::shm::handle& handle) {
        const std::array<std::uint64_t, 5> words{static_cast<std::uint64_t>(handle.pid),
                                                 static_cast<std::uint64_t>(handle.fd),
                                                 handle.start_time, handle.offset, handle.length};
        std::string text(64, '\0');
        std::memcpy(text.data(), words.data(), sizeof words);
        return text;
    }
    [[nodiscard]] static weightwire::shm::handle unpacked(std::string_view text) {
        if (text.size() != 64) {
            throw weightwire::protocol_error{"a handle has 64 bytes, this has " +
                                             std::to_string(text.size())};
        }
        std::array<std::uint64_t, 5> words{};
        std::memcpy(words.data(), text.data(), sizeof words);
        return {.pid = static_cast<std::int64_t>(words[0]),
                .fd = static_cast<std::int64_t>(words[1]),
                .start_time = words[2],
                .offset = words[3],
                .length = words[4]};
    }

    int device_;
};

static_assert(weightwire::cuda_ipc::Machinery<host_ipc_machinery>);

}  // namespace tests
