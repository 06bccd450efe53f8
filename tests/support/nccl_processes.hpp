#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/wire/client_calls.hpp>
#include <weightwire/wire/envelope.hpp>
#include <weightwire/worker.hpp>

#include "forked.hpp"
#include "host_nccl.hpp"
#include "small_model.hpp"

/// @file
/// A worker and a trainer of `nccl` over host memory, each a process of its own that can be told,
/// between rounds too, to die, stop or fail when it comes to a step: one of the group's
/// (`host_world::at_step`), or a call of the protocol, `call /path` before it and `done /path`
/// after it.

namespace tests {

inline constexpr int nccl_parameters = 8;
inline constexpr int nccl_elements = 3000;

/// What a worker of these processes serves after a round of that version.
inline small_weights weights_of(std::uint64_t version) {
    small_weights weights{nccl_parameters, nccl_elements};
    weights.set(version);
    return weights;
}
inline bool says(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

/// What happens at the `count`-th time (from 0) from now on that the process comes to `step`.
struct group_fault {
    static constexpr std::size_t longest_step = 48;

    std::array<char, longest_step> step{};
    std::uint64_t count = 0;
    std::array<char, 16> act{};  ///< die, die_late, die_beside, stop, delay, claim N, throw

    group_fault() = default;
    group_fault(std::string_view where, std::uint64_t when, std::string_view what) : count{when} {
        where.copy(step.data(), step.size() - 1);
        what.copy(act.data(), act.size() - 1);
    }
    [[nodiscard]] bool is_none() const noexcept { return step[0] == 0; }
    /// For this process, from now on; nothing disarms.
    void arm() const;
};

/// The fault of this process.
struct armed_fault {
    std::mutex mutex{};
    group_fault wanted{};
    std::uint64_t seen = 0;
    std::atomic<int> claim{0};  ///< the number of ranks that it says next; 0: the truth

    [[nodiscard]] static armed_fault& of_process() {
        static armed_fault armed;
        return armed;
    }
    /// Before threads start.
    static void watch() {
        host_world::at_step = [](std::string_view step, std::uint64_t) { of_process().meet(step); };
    }

private:
    void meet(std::string_view step) {
        std::string act;
        {
            const std::lock_guard lock{mutex};
            if (wanted.is_none() || step != wanted.step.data() || seen++ != wanted.count) {
                return;
            }
            act = wanted.act.data();
        }
        const auto die_late = [] {
            std::this_thread::sleep_for(std::chrono::milliseconds{200});
            ::raise(SIGKILL);  // under sanitizers an exit takes its time
        };
        if (act == "die") {
            ::_exit(86);
        }
        if (act == "die_late") {  // what is on its way to others arrives
            die_late();
        } else if (act == "die_beside") {  // this thread goes on
            std::thread{die_late}.detach();
        } else if (act == "delay") {
            std::this_thread::sleep_for(std::chrono::seconds{2});
        } else if (act.starts_with("claim ")) {
            claim = std::stoi(act.substr(6));
        } else if (act == "stop") {
            ::raise(SIGSTOP);
        } else {
            throw weightwire::resource_error{"this rank was told to fail",
                                             {.operation = std::string{step}}};
        }
    }
};

inline void group_fault::arm() const {
    auto& armed = armed_fault::of_process();
    const std::lock_guard lock{armed.mutex};
    armed.wanted = *this;
    armed.seen = 0;
}

/// What a worker process is.
struct nccl_worker_options {
    group_fault fault{};
    int ranks = 1;
    int nccl_version = 22809;
    weightwire::commit_mode mode = weightwire::commit_mode::flip;
    /// Says to be this vLLM, and offers no native wire; below 0.30 it takes no id in the init call.
    const char* vllm = "";
    /// Before it looks at an init that names a store, clients of the store are made that say
    /// nonsense and nothing, and stay.
    bool rogues = false;
    std::chrono::milliseconds vllm_call_budget{290'000};
};

/// The worker's routes behind what the options ask for.
template <class Service>
class told_service {
public:
    told_service(Service& service, const nccl_worker_options& options)
        : service_{service}, options_{options} {}

    weightwire::http_response handle(const weightwire::http_request& request) {
        const std::string path{request.path};
        if (path == "/failures") {
            const std::lock_guard lock{mutex_};
            return {.body = nlohmann::json(std::exchange(failures_, {})).dump()};
        }
        weightwire::http_response response;
        try {
            host_world::meet("call " + path, 0);
            response = answer(request);
            host_world::meet("done " + path, 0);
        } catch (const weightwire::error& failed) {
            response = weightwire::wire::error_response(
                weightwire::wire::make_http_error(500, failed.what()));
        }
        const bool asks_older = response.body.find("unexpected keyword") != std::string::npos;
        if (request.method == "POST" && response.status >= 400 && !asks_older) {
            const std::lock_guard lock{mutex_};
            failures_.push_back(path + ": " + response.body);
        }
        return response;
    }

private:
    weightwire::http_response answer(const weightwire::http_request& request) {
        const std::string vllm{options_.vllm};
        if (const int claim =
                request.path == "/get_world_size" ? armed_fault::of_process().claim.exchange(0) : 0;
            claim != 0) {
            return {.body = nlohmann::json{{"world_size", claim}}.dump()};
        }
        if (request.path == "/version" && !vllm.empty()) {
            return {.body = nlohmann::json{{"version", vllm}}.dump()};
        }
        if (request.path == "/init_weight_transfer_engine" && !vllm.empty()) {
            if (vllm < "0.30" &&
                request.body.find("nccl_unique_id_b64") != std::string_view::npos) {
                return weightwire::wire::error_response(weightwire::wire::make_http_error(
                    500, "__init__() got an unexpected keyword argument 'nccl_unique_id_b64'"));
            }
            meet_store(request.body);
        }
        return service_.handle(request);
    }
    void meet_store(std::string_view body) {
        const auto info = nlohmann::json::parse(body).at("init_info");
        for (const std::string_view said : {"", "GET / HTTP/1.1\r\n\r\n", "\xFF\xFF\xFF\xFF"}) {
            if (!options_.rogues || !info.contains("master_port")) {
                return;
            }
            host_socket rogue{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
            sockaddr_in address{};
            address.sin_family = AF_INET;
            address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            address.sin_port = htons(info.at("master_port").get<std::uint16_t>());
            if (::connect(rogue.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
                throw weightwire::resource_error{"the store cannot be reached"};
            }
            static_cast<void>(::send(rogue.fd(), said.data(), said.size(), MSG_NOSIGNAL));
            const std::lock_guard lock{mutex_};
            rogues_.push_back(std::move(rogue));
        }
    }

    Service& service_;
    nccl_worker_options options_;
    std::mutex mutex_;
    std::vector<std::string> failures_;
    std::vector<host_socket> rogues_;
};

/// A worker server over parameter tables, one a rank.
class nccl_worker {
public:
    explicit nccl_worker(nccl_worker_options options = {})
        : process_{[options](channel& parent) {
              armed_fault::watch();
              options.fault.arm();
              host_world::nccl_version = options.nccl_version;
              serve(parent, options);
          }} {
        port_ = process_.to().take<int>();
    }
    [[nodiscard]] std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
    [[nodiscard]] forked& process() noexcept { return process_; }
    /// From now on.
    void arm(const group_fault& fault) {
        process_.to().put(fault);
        static_cast<void>(process_.to().take<char>());
    }

    [[nodiscard]] std::string version() const {
        return parsed("GET", "/weight_info").at("weight_version").get<std::string>();
    }
    /// Whether it serves `weights` under `version`.
    [[nodiscard]] bool serves(std::uint64_t version_wanted, const small_weights& weights) const {
        const auto held =
            parsed("POST", "/weight_checker", R"({"action":"checksum"})").at("checksums");
        bool same = version() == std::to_string(version_wanted);
        for (const auto& [name, digest] : held.items()) {
            bool found = false;
            for (std::size_t i = 0; i < weights.metadata().size(); ++i) {
                if (name.ends_with(weights.metadata()[i].name)) {
                    found = digest == weights.digest_of(i);
                }
            }
            same = same && found;
        }
        return same && !held.empty();
    }
    /// What it has refused since this was last asked, each with the path before it.
    [[nodiscard]] std::string failures() const {
        std::string all;
        for (const auto& text : parsed("GET", "/failures")) {
            all += text.get<std::string>() + "\n";
        }
        return all;
    }
    /// The same once it has refused a call of `path`; gives up after ten seconds.
    [[nodiscard]] std::string failure_of(std::string_view path) const {
        const auto until = weightwire::deadline::after(std::chrono::seconds{10});
        auto all = failures();
        while (all.find(path) == std::string::npos && !until.expired()) {
            std::this_thread::sleep_for(std::chrono::milliseconds{5});
            all += failures();
        }
        return all;
    }
    [[nodiscard]] weightwire::http_answer ask(std::string_view method, std::string_view path,
                                              std::string_view body = {}) const {
        weightwire::http_sync_client client{url()};
        return client
            .request(method, path, {.bodies = {&body, 1}},
                     weightwire::deadline::after(std::chrono::seconds{20}))
            .front()
            .answer;
    }

private:
    [[nodiscard]] nlohmann::json parsed(std::string_view method, std::string_view path,
                                        std::string_view body = {}) const {
        return nlohmann::json::parse(ask(method, path, body).body);
    }
    static void serve(channel& parent, const nccl_worker_options& options) {
        using namespace weightwire;
        std::vector<std::unique_ptr<parameter_table>> tables;
        std::vector<parameter_table*> sinks;
        for (int rank = 0; rank < options.ranks; ++rank) {
            tables.push_back(
                std::make_unique<parameter_table>(small_model(nccl_parameters, nccl_elements),
                                                  parameter_table_options{.mode = options.mode}));
            sinks.push_back(tables.back().get());
        }
        worker_engine engine{host_nccl{}, sinks,
                             worker_options<>{.vllm_call_budget = options.vllm_call_budget}};
        worker_service service{engine};
        told_service told{service, options};
        worker_server server{told, {}};
        server.start();
        parent.put(static_cast<int>(server.port()));
        for (;;) {
            try {
                parent.take<group_fault>().arm();
                parent.put('a');
            } catch (const std::runtime_error& failed) {
                if (std::string_view{failed.what()} != "the other process says nothing") {
                    return;
                }
            }
        }
    }

    forked process_;
    int port_ = 0;
};

/// A client whose calls are steps at which a trainer can be told to die.
class stepping_client : public weightwire::client_calls<stepping_client> {
public:
    explicit stepping_client(const std::string& url) : inner_{url} {}

    [[nodiscard]] std::size_t peer_count() const noexcept { return 1; }
    [[nodiscard]] std::string_view peer_name(std::size_t peer) const {
        return inner_.peer_name(peer);
    }
    [[nodiscard]] std::vector<weightwire::peer_reply> request(
        std::string_view method, std::string_view target,
        const weightwire::control_message& message, weightwire::deadline until,
        std::stop_token stop = {}) {
        const std::string path{target.substr(0, target.find('?'))};
        host_world::meet("call " + path, 0);
        auto replies = inner_.request(method, target, message, until, std::move(stop));
        host_world::meet("done " + path, 0);
        return replies;
    }

private:
    weightwire::http_sync_client<> inner_;
};

/// Chooses packed buffers so small that a round has several chunks.
inline host_nccl_info small_chunks(bool packed = true) {
    host_nccl_info info;
    info.packed = packed;
    info.packed_buffer_size_bytes = 20'000;
    return info;
}

inline auto clients_of(const std::vector<std::string>& urls) {
    std::vector<stepping_client> clients;
    for (const auto& url : urls) {
        clients.emplace_back(url);
    }
    return weightwire::fan_out_sync_client{std::move(clients)};
}

/// A trainer in this process, with weights of its own.
struct nccl_trainer {
    explicit nccl_trainer(const std::vector<std::string>& urls,
                          const host_nccl_info& info = small_chunks(),
                          std::chrono::milliseconds init_budget = std::chrono::seconds{20})
        : engine{weightwire::trainer_init(info, clients_of(urls), weights,
                                          {.init_budget = init_budget})} {}

    weightwire::sync_report round(std::uint64_t version,
                                  std::chrono::milliseconds budget = std::chrono::seconds{20}) {
        weights.set(version);
        return engine.send_weights(
            {.version = version, .deadline = weightwire::deadline::after(budget)});
    }

    small_weights weights{nccl_parameters, nccl_elements};
    decltype(weightwire::trainer_init(small_chunks(), clients_of({}),
                                      std::declval<small_weights&>())) engine;
};

/// Runs `work`, which has to fail, and returns the error's text.
template <class Work>
std::string text_of_failure(Work work) {
    try {
        work();
    } catch (const weightwire::error& failed) {
        return failed.what();
    }
    return "nothing failed";
}

/// Whether a trainer that comes afterwards finds the workers as they are and sends them a round.
inline bool recovers(const std::vector<const nccl_worker*>& workers, std::uint64_t version,
                     const host_nccl_info& info = small_chunks()) {
    std::vector<std::string> urls;
    for (const auto* worker : workers) {
        urls.push_back(worker->url());
    }
    nccl_trainer fresh{urls, info};
    bool good = fresh.round(version).all_committed();
    for (const auto* worker : workers) {
        good = good && worker->serves(version, fresh.weights);
    }
    return good;
}

/// A trainer process: opens, says `o`, and sends a round of the version that it is told, armed with
/// `fault` just before it opens (`in` is 0) or sends version `in`. Leaves the text of its error.
inline forked nccl_trainer_process(const std::vector<std::string>& urls, group_fault fault,
                                   std::uint64_t in, host_nccl_info info = small_chunks()) {
    return forked{[urls, fault, in, info](channel& parent) {
        armed_fault::watch();
        if (in == 0) {
            fault.arm();
        }
        nccl_trainer trainer{urls, info};
        parent.put('o');
        for (;;) {
            const auto version = parent.take<std::uint64_t>();
            if (version == in) {
                fault.arm();
            }
            trainer.round(version);
            parent.put('r');
        }
    }};
}

}  // namespace tests
