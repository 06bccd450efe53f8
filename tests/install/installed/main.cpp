// SPDX-License-Identifier: Apache-2.0
// A backend of our own: the trainer writes each round into a file and the worker reads it, as over
// a shared file system.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <unistd.h>

#include <weightwire/engine/local_sync_client.hpp>
#include <weightwire/engine/trainer_engine.hpp>
#include <weightwire/engine/worker_engine.hpp>
#include <weightwire/engine/worker_service.hpp>
#include <weightwire/sinks/parameter_table.hpp>
#include <weightwire/sources/span_source.hpp>

namespace file_backend {

namespace ww = weightwire;

struct backend {};

struct init_info {
    using backend = file_backend::backend;
    int rank = 0;
    std::string directory{};  ///< where rounds are written; the worker must see it too
    std::string init_message() const { return "{\"directory\":\"" + directory + "\"}"; }
};

using file = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

inline std::string path_of(const std::string& directory, std::uint64_t round) {
    return directory + "/round_" + std::to_string(round);
}

class sender {
public:
    explicit sender(const init_info& info) : directory_{info.directory} {}
    std::vector<ww::transport_init> prepare(const ww::sender_context& context) {
        parts_ = {{.first = 0, .count = context.parameters.size()}};
        return std::vector<ww::transport_init>(context.peers.size(), {.native = "{}"});
    }
    void open(ww::deadline, std::stop_token) {}
    std::span<const ww::update_part> parts() const { return parts_; }
    void send(std::uint64_t round, std::size_t part, ww::tensor_stream& stream, ww::deadline,
              std::stop_token) {
        const auto path = path_of(directory_, round);
        const auto unfinished = path + ".unfinished";
        {
            const file out{std::fopen(unfinished.c_str(), "wb"), &std::fclose};
            for (std::size_t i = 0; out && i < parts_[part].count; ++i) {
                const auto bytes = stream.next()->tensor.bytes();
                std::fwrite(bytes.data(), 1, bytes.size(), out.get());
            }
        }
        if (std::rename(unfinished.c_str(), path.c_str()) != 0) {
            throw ww::resource_error{"cannot write " + path, {.phase = ww::phase::update}};
        }
    }
    void close(ww::deadline) {}

private:
    std::string directory_;
    std::vector<ww::update_part> parts_;
};

class receiver {
public:
    explicit receiver(const ww::receiver_context&) {}
    void open(const ww::transport_open& init, ww::deadline, std::stop_token) {
        const auto begin = init.wire_parameters.find(":\"") + 2;
        directory_ = init.wire_parameters.substr(begin, init.wire_parameters.rfind('"') - begin);
    }
    void receive(const ww::update_message& message, ww::update_target& target, ww::deadline until,
                 std::stop_token stop) {
        const auto in = wait_for(path_of(directory_, message.round), until, stop);
        for (std::size_t i = 0; i < target.size(); ++i) {
            std::vector<std::byte> bytes(target.parameter(i).byte_size());
            if (std::fread(bytes.data(), 1, bytes.size(), in.get()) != bytes.size()) {
                throw ww::data_error{"the round's file is too short", {.phase = ww::phase::update}};
            }
            const auto where = target.open(i, until);
            if (where.data() != nullptr) {
                std::memcpy(where.data(), bytes.data(), bytes.size());
            }
            target.wrote(i, 0, bytes.size(), until);
        }
    }
    void release() noexcept { directory_.clear(); }

private:
    static file wait_for(const std::string& path, ww::deadline until, const std::stop_token& stop) {
        for (;;) {
            file in{std::fopen(path.c_str(), "rb"), &std::fclose};
            if (in) {
                return in;
            }
            if (until.expired() || stop.stop_requested()) {
                throw ww::timeout_error{path + " did not appear", {.phase = ww::phase::update}};
            }
            std::this_thread::sleep_for(std::chrono::milliseconds{1});
        }
    }

    std::string directory_;
};

}  // namespace file_backend

template <>
struct weightwire::backend_traits<file_backend::backend> {
    static constexpr std::string_view wire_name = "file";
    static constexpr transport_capabilities capabilities{.host_memory = true};
    using init_info = file_backend::init_info;
    using sender = file_backend::sender;
    using receiver = file_backend::receiver;
};
static_assert(weightwire::explain_transport<file_backend::backend>());

namespace {

/// A fresh folder that goes away.
struct temporary_directory {
    temporary_directory() {
        if (::mkdtemp(name.data()) == nullptr) {
            std::abort();
        }
    }
    ~temporary_directory() {
        for (std::uint64_t round = 0; round < 10; ++round) {
            std::remove(file_backend::path_of(name, round).c_str());
        }
        ::rmdir(name.c_str());
    }
    std::string name = "./rounds_XXXXXX";
};

}  // namespace

int main() {
    using namespace weightwire;
    using namespace std::chrono_literals;

    std::vector<std::uint16_t> weights(5000);
    const auto* bytes = reinterpret_cast<const std::byte*>(weights.data());
    span_source source{{"weights", tensor_view{bytes, dtype::bf16, {50, 100}}}};

    parameter_table table{std::vector<param_meta>{{"weights", dtype::bf16, {50, 100}}}};
    worker_engine worker{file_backend::backend{}, table};
    worker_service service{worker};

    const temporary_directory folder;
    local_sync_client client{service};
    auto engine = trainer_init(file_backend::init_info{.directory = folder.name}, client, source);
    for (std::uint16_t round = 1; round <= 3; ++round) {
        weights.assign(weights.size(), round);
        const auto report = engine.send_weights({.deadline = deadline::after(20s)});
        const auto served = table.acquire();
        if (!report.all_committed() || served.version() != report.version ||
            std::memcmp(served.tensor(0).data(), bytes, 10'000) != 0) {
            std::fprintf(stderr, "installed: the worker serves other weights than were sent\n");
            return 1;
        }
    }
    engine.close(deadline::after(5s));
    std::puts("installed: 3 rounds through a backend of our own");
    return 0;
}
