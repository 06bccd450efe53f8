// SPDX-License-Identifier: Apache-2.0
// A backend of our own: tensors travel through a queue in the trainer's memory, whose address the
// worker, in the same process, learns at init.

#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/engine/local_sync_client.hpp>
#include <weightwire/engine/trainer_engine.hpp>
#include <weightwire/engine/worker_engine.hpp>
#include <weightwire/engine/worker_service.hpp>
#include <weightwire/sinks/parameter_table.hpp>
#include <weightwire/sources/span_source.hpp>

namespace queue_backend {

namespace ww = weightwire;

struct backend {};

struct init_info {
    using backend = queue_backend::backend;
    int rank = 0;
    std::string init_message() const { return "{}"; }
};

/// One worker's queue of tensors.
class queue {
public:
    void push(std::span<const std::byte> bytes) {
        {
            const std::lock_guard lock{mutex_};
            tensors_.emplace_back(bytes.begin(), bytes.end());
        }
        arrived_.notify_one();
    }
    std::vector<std::byte> pop(ww::deadline until, const std::stop_token& stop) {
        std::unique_lock lock{mutex_};
        if (!arrived_.wait_until(lock, stop, until.when(), [this] { return !tensors_.empty(); })) {
            throw ww::timeout_error{"no tensor arrived in the queue", {.phase = ww::phase::update}};
        }
        auto bytes = std::move(tensors_.front());
        tensors_.pop_front();
        return bytes;
    }

private:
    std::mutex mutex_;
    std::condition_variable_any arrived_;
    std::deque<std::vector<std::byte>> tensors_;
};

class sender {
public:
    explicit sender(const init_info&) {}
    std::vector<ww::transport_init> prepare(const ww::sender_context& context) {
        parts_ = {{.first = 0, .count = context.parameters.size()}};
        std::vector<ww::transport_init> inits;
        for (std::size_t i = 0; i < context.peers.size(); ++i) {
            queues_.push_back(std::make_unique<queue>());
            const auto address = reinterpret_cast<std::uintptr_t>(queues_.back().get());
            inits.push_back({.native = "{\"queue\":" + std::to_string(address) + "}"});
        }
        return inits;
    }
    void open(ww::deadline, std::stop_token) {}
    std::span<const ww::update_part> parts() const { return parts_; }
    void send(std::uint64_t, std::size_t part, ww::tensor_stream& stream, ww::deadline,
              std::stop_token) {
        for (std::size_t i = 0; i < parts_[part].count; ++i) {
            const auto* entry = stream.next();
            for (auto& each : queues_) {
                each->push(entry->tensor.bytes());
            }
        }
    }
    void close(ww::deadline) {}

private:
    std::vector<ww::update_part> parts_;
    std::vector<std::unique_ptr<queue>> queues_;
};

class receiver {
public:
    explicit receiver(const ww::receiver_context&) {}
    void open(const ww::transport_open& init, ww::deadline, std::stop_token) {
        const auto digits = init.transport.substr(init.transport.find(':') + 1);
        std::uintptr_t address = 0;
        std::from_chars(digits.data(), digits.data() + digits.size(), address);
        queue_ = reinterpret_cast<queue*>(address);
    }
    void receive(const ww::update_message&, ww::update_target& target, ww::deadline until,
                 std::stop_token stop) {
        for (std::size_t i = 0; i < target.size(); ++i) {
            const auto bytes = queue_->pop(until, stop);
            const auto where = target.open(i, until);
            if (where.data() != nullptr) {
                std::memcpy(where.data(), bytes.data(), bytes.size());
            }
            target.wrote(i, 0, bytes.size(), until);
        }
    }
    void release() noexcept { queue_ = nullptr; }

private:
    queue* queue_ = nullptr;
};

}  // namespace queue_backend

template <>
struct weightwire::backend_traits<queue_backend::backend> {
    static constexpr std::string_view wire_name = "queue";
    static constexpr transport_capabilities capabilities{.host_memory = true};
    using init_info = queue_backend::init_info;
    using sender = queue_backend::sender;
    using receiver = queue_backend::receiver;
};
static_assert(weightwire::explain_transport<queue_backend::backend>());

namespace {

int fail(const char* what) {
    std::fprintf(stderr, "vendored: %s\n", what);
    return 1;
}

}  // namespace

int main() {
    using namespace weightwire;
    using namespace std::chrono_literals;

    std::vector<float> first(1000);
    std::vector<std::int32_t> second(7);
    span_source source{
        {"first", tensor_view{reinterpret_cast<std::byte*>(first.data()), dtype::f32, {10, 100}}},
        {"second", tensor_view{reinterpret_cast<std::byte*>(second.data()), dtype::i32, {7}}}};

    const auto listed = source.metadata();
    parameter_table table{std::vector<param_meta>{listed.begin(), listed.end()}};
    worker_engine worker{queue_backend::backend{}, table};
    worker_service service{worker};

    local_sync_client client{service};
    auto engine = trainer_init(queue_backend::init_info{}, client, source);
    for (int round = 1; round <= 3; ++round) {
        first.assign(first.size(), 0.5F * static_cast<float>(round));
        second.assign(second.size(), round);
        const auto report = engine.send_weights({.deadline = deadline::after(20s)});
        if (!report.all_committed()) {
            return fail("the worker did not commit");
        }
        const auto weights = table.acquire();
        if (weights.version() != report.version ||
            std::memcmp(weights.tensor(0).data(), first.data(), 4000) != 0 ||
            std::memcmp(weights.tensor(1).data(), second.data(), 28) != 0) {
            return fail("the worker serves other weights than were sent");
        }
    }
    engine.close(deadline::after(5s));
    std::puts("vendored: 3 rounds through a backend of our own");
    return 0;
}
