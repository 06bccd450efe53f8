// SPDX-License-Identifier: Apache-2.0
//
// A backend of one's own: a tag, an init info, two halves and one specialization. This one moves
// bytes through a file that both sides can read, which is slow and easy to follow.

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <string>
#include <system_error>
#include <vector>

#include <weightwire/weightwire.hpp>

namespace spool {

using namespace weightwire;

struct backend {};

/// Everything both sides must agree on is here, and travels at init.
struct init_info {
    using backend = spool::backend;
    std::string path;
    int rank = 0;
    std::string init_message() const { return R"({"path":")" + path + R"("})"; }
};

[[noreturn]] inline void fail(const char* operation, phase where) {
    throw resource_error{"the spool file cannot be used; check its folder",
                         {.phase = where,
                          .backend = "spool",
                          .operation = operation,
                          .native_code = errno,
                          .native_text = std::generic_category().message(errno)}};
}

/// The trainer's half: writes all tensors, one behind the other, then lets the update call tell the
/// worker.
class sender {
public:
    explicit sender(const init_info& info) : path_{info.path} {}
    ~sender() { ::unlink(path_.c_str()); }
    sender(const sender&) = delete;
    sender& operator=(const sender&) = delete;

    std::vector<transport_init> prepare(const sender_context& context) {
        part_ = {.first = 0, .count = context.parameters.size()};
        return {context.peers.size(), transport_init{.native = "{}"}};
    }
    void open(deadline, std::stop_token) {}
    std::span<const update_part> parts() const { return {&part_, 1}; }

    void send(std::uint64_t round, std::size_t, tensor_stream& stream, deadline, std::stop_token) {
        const auto partial = path_ + ".partial";
        const int file = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        bool written = file >= 0;
        for (std::size_t i = 0; i < part_.count; ++i) {
            const auto bytes = stream.next()->tensor.bytes();
            written = written && ::write(file, bytes.data(), bytes.size()) ==
                                     static_cast<ssize_t>(bytes.size());
        }
        ::close(file);
        if (!written || ::rename(partial.c_str(), (path_ + std::to_string(round)).c_str()) != 0) {
            fail("write", phase::update);
        }
        previous_ = path_ + std::to_string(round);
    }
    void close(deadline) { ::unlink(previous_.c_str()); }

private:
    std::string path_;
    std::string previous_;
    update_part part_;
};

/// The worker's half: waits for the file of the round, reads it into the sink's destinations.
class receiver {
public:
    explicit receiver(const receiver_context&) {}

    void open(const transport_open& init, deadline, std::stop_token) {
        const std::string text{init.wire_parameters};
        const auto begin = text.find(":\"") + 2;
        path_ = text.substr(begin, text.rfind('"') - begin);
    }
    void receive(const update_message& message, update_target& target, deadline until,
                 std::stop_token stop) {
        const auto path = path_ + std::to_string(message.round);
        int file = -1;
        while ((file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC)) < 0) {
            if (until.expired() || stop.stop_requested()) {
                throw timeout_error{"the trainer's file did not come",
                                    {.phase = phase::update, .backend = "spool"}};
            }
            ::usleep(1000);
        }
        bool complete = true;
        for (std::size_t i = 0; i < target.size(); ++i) {
            const auto bytes = target.open(i, until).bytes();
            complete = complete && ::read(file, bytes.data(), bytes.size()) ==
                                       static_cast<ssize_t>(bytes.size());
            target.wrote(i, 0, bytes.size(), until);
        }
        ::close(file);
        ::unlink(path.c_str());
        if (!complete) {
            fail("read", phase::update);
        }
    }
    void release() noexcept {}

private:
    std::string path_;
};

}  // namespace spool

template <>
struct weightwire::backend_traits<spool::backend> {
    static constexpr std::string_view wire_name = "spool";
    static constexpr transport_capabilities capabilities{.host_memory = true};
    using init_info = spool::init_info;
    using sender = spool::sender;
    using receiver = spool::receiver;
};
static_assert(weightwire::explain_transport<spool::backend>());

int main() try {
    const std::vector<weightwire::param_meta> model{{"weight", weightwire::dtype::f32, {4}}};
    weightwire::parameter_table table{model};
    weightwire::worker_engine worker{spool::backend{}, table};
    weightwire::worker_service service{worker};

    std::array<float, 4> weights{};
    const weightwire::tensor_view view{
        reinterpret_cast<const std::byte*>(weights.data()), weightwire::dtype::f32, {4}};
    std::string folder = "/tmp/weightwire-spool-XXXXXX";
    if (::mkdtemp(folder.data()) == nullptr) {
        spool::fail("mkdtemp", weightwire::phase::init);
    }
    weightwire::local_sync_client client{service};
    auto engine =
        weightwire::trainer_init(spool::init_info{.path = folder + "/round"}, client,
                                 weightwire::span_source{{.name = "weight", .tensor = view}});
    for (int step = 1; step <= 3; ++step) {
        weights.fill(static_cast<float>(step));
        const auto report = engine.send_weights();
        const auto snapshot = table.acquire();
        fmt::print("version {}: the worker holds {}\n", report.version,
                   *reinterpret_cast<const float*>(snapshot.tensor(0).data()));
    }
    engine.close(weightwire::deadline::after(std::chrono::seconds{1}));
    return ::rmdir(folder.c_str()) == 0 ? 0 : 1;
} catch (const std::exception& failed) {
    fmt::print(stderr, "custom_backend: {}\n", failed.what());
    return 1;
}
