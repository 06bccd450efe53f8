// SPDX-License-Identifier: Apache-2.0
//
// A backend of one's own: a tag, an init info, two halves and one specialization. This one moves
// bytes through a file that both sides can read, which is slow and easy to follow. With the
// argument `--check` it runs the conformance suite on it instead.

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include <weightwire/sinks/tensor_copy.hpp>
#include <weightwire/testing/conformance/transport.hpp>
#include <weightwire/weightwire.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>

namespace spool {

using namespace weightwire;

struct backend {};

/// Everything both sides must agree on is here, and travels at init.
struct init_info {
    using backend = spool::backend;
    std::string path;
    int rank = 0;
    std::string init_message() const {
        std::string text;
        wire::json_writer{text}.begin_object().key("path").string(path).end_object();
        return text;
    }
};

[[noreturn]] inline void fail(const char* operation, phase where) {
    throw resource_error{"the spool file cannot be used; check its folder",
                         {.phase = where,
                          .backend = "spool",
                          .operation = operation,
                          .native_code = errno,
                          .native_text = std::generic_category().message(errno)}};
}

/// Every wait and every loop over tensors asks this.
inline void require_time(deadline until, const std::stop_token& stop) {
    const error_context where{.phase = phase::update, .backend = "spool"};
    if (stop.stop_requested()) {
        throw cancelled_error{"the round was stopped", where};
    }
    if (until.expired()) {
        throw timeout_error{"the spool file was not there or not read in time; allow more", where};
    }
}

inline std::string file_of(const std::string& path, std::uint64_t nonce, std::uint64_t round) {
    return fmt::format("{}-{:x}-{}", path, nonce, round);
}

/// The trainer's half: `stage` writes all tensors, one behind the other, before the update call
/// tells the workers to read.
class sender {
public:
    explicit sender(const init_info& info) : path_{info.path} {}
    ~sender() { remove_file(); }
    sender(const sender&) = delete;
    sender& operator=(const sender&) = delete;

    std::vector<transport_init> prepare(const sender_context& context) {
        part_ = {.first = 0, .count = context.parameters.size()};
        nonce_ = std::random_device{}();  // no file of an earlier trainer is taken for ours
        const auto native = fmt::format(R"({{"nonce":{}}})", nonce_);
        return {context.peers.size(), transport_init{.native = native}};
    }
    void open(deadline, std::stop_token) {}
    std::span<const update_part> parts() const { return {&part_, 1}; }

    void stage(std::uint64_t round, std::size_t, tensor_stream& stream, deadline until,
               std::stop_token stop) {
        remove_file();
        const auto complete = file_of(path_, nonce_, round);
        file_ = complete + ".partial";
        std::ofstream file{file_, std::ios::binary};
        for (std::size_t i = 0; i < part_.count; ++i) {
            require_time(until, stop);
            const auto& from = stream.next()->tensor;
            bytes_.resize(from.byte_size());
            if (!stream.read(0, bytes_)) {
                copy_tensor({bytes_.data(), from.type(), from.extents()}, from);
            }
            file.write(reinterpret_cast<const char*>(bytes_.data()), std::ssize(bytes_));
        }
        file.close();
        if (!file || std::rename(file_.c_str(), complete.c_str()) != 0) {
            fail("write", phase::update);
        }
        file_ = complete;
    }
    void send(std::uint64_t, std::size_t, tensor_stream&, deadline, std::stop_token) {}
    void close(deadline) { remove_file(); }

private:
    void remove_file() noexcept { ::unlink(file_.c_str()); }

    std::string path_;
    std::string file_;  // of the last round
    std::uint64_t nonce_ = 0;
    update_part part_;
    std::vector<std::byte> bytes_;
};

/// The worker's half: reads the file of the round into the sink's destinations.
class receiver {
public:
    explicit receiver(const receiver_context&) {}

    void open(const transport_open& init, deadline, std::stop_token) {
        const wire::json_document agreed{init.wire_parameters, "spool parameters", phase::init};
        const wire::json_document told{init.transport, "spool transport", phase::init};
        path_ = agreed.root().at("path").string(4096);
        nonce_ = told.root().at("nonce").natural();
    }
    void receive(const update_message& message, update_target& target, deadline until,
                 std::stop_token stop) {
        std::ifstream file;
        while (!file.is_open()) {
            require_time(until, stop);
            file.open(file_of(path_, nonce_, message.round), std::ios::binary);
            if (!file.is_open()) {
                std::this_thread::sleep_for(std::chrono::milliseconds{1});
            }
        }
        for (std::size_t i = 0; i < target.size(); ++i) {
            require_time(until, stop);
            const auto& parameter = target.parameter(i);
            bytes_.resize(static_cast<std::size_t>(parameter.byte_size()));
            if (!file.read(reinterpret_cast<char*>(bytes_.data()), std::ssize(bytes_))) {
                fail("read", phase::update);
            }
            const auto to = target.open(i, until);
            if (to.data() != nullptr) {  // else not wanted, but reported
                copy_tensor(to, tensor_view{bytes_.data(), parameter.dtype, parameter.shape});
            }
            target.wrote(i, 0, bytes_.size(), until);
        }
    }
    void release() noexcept {}

private:
    std::string path_;
    std::uint64_t nonce_ = 0;
    std::vector<std::byte> bytes_;
};

}  // namespace spool

template <>
struct weightwire::backend_traits<spool::backend> {
    static constexpr std::string_view wire_name = "spool";
    static constexpr transport_capabilities capabilities{.host_memory = true, .one_sided = true};
    using init_info = spool::init_info;
    using sender = spool::sender;
    using receiver = spool::receiver;
};
static_assert(weightwire::explain_transport<spool::backend>());

namespace {

bool passes_the_suite(const std::string& folder) {
    const auto report =
        weightwire::testing::check_transport<spool::backend>({.path = folder + "/round"});
    fmt::print("{}", report.text());
    return report.passed();
}

void run(const std::string& folder) {
    const std::vector<weightwire::param_meta> model{{"weight", weightwire::dtype::f32, {4}}};
    weightwire::parameter_table table{model};
    weightwire::worker_engine worker{spool::backend{}, table};
    weightwire::worker_service service{worker};

    std::array<float, 4> weights{};
    const weightwire::tensor_view view{
        reinterpret_cast<const std::byte*>(weights.data()), weightwire::dtype::f32, {4}};
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
}

}  // namespace

int main(int argc, char** argv) try {
    std::string folder = "/tmp/weightwire-spool-XXXXXX";
    if (::mkdtemp(folder.data()) == nullptr) {
        spool::fail("mkdtemp", weightwire::phase::init);
    }
    bool good = true;
    if (argc > 1 && argv[1] == std::string_view{"--check"}) {
        good = passes_the_suite(folder);
    } else {
        run(folder);
    }
    return ::rmdir(folder.c_str()) == 0 && good ? 0 : 1;
} catch (const std::exception& failed) {
    fmt::print(stderr, "custom_backend: {}\n", failed.what());
    return 1;
}
