#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/worker.hpp>

#include "forked.hpp"
#include "host_nccl.hpp"
#include "small_model.hpp"

/// @file
/// A worker and a trainer of `nccl` over host memory, each a process of its own that can be told to
/// die, stop or fail at a step of the group's.

namespace tests {

inline constexpr int nccl_parameters = 8;
inline constexpr int nccl_elements = 3000;

/// What happens at the `count`-th time (from 0) that the process comes to `step`.
struct group_fault {
    std::string step{};
    std::uint64_t count = 0;
    std::string act{};  ///< die, stop, throw

    /// For this process, from now on.
    void arm() const {
        if (step.empty()) {
            return;
        }
        auto seen = std::make_shared<std::atomic<std::uint64_t>>(0);
        host_world::at_step = [wanted = *this, seen](std::string_view at, std::uint64_t) {
            if (at != wanted.step || (*seen)++ != wanted.count) {
                return;
            }
            if (wanted.act == "die") {
                ::_exit(86);
            }
            if (wanted.act == "stop") {
                ::raise(SIGSTOP);
            } else {
                throw weightwire::resource_error{"this rank was told to fail",
                                                 {.operation = wanted.step}};
            }
        };
    }
};

/// A worker server over parameter tables, one a rank.
class nccl_worker {
public:
    explicit nccl_worker(group_fault fault = {}, int ranks = 1, int nccl_version = 0)
        : process_{[fault, ranks, nccl_version](channel& parent) {
              fault.arm();
              host_world::nccl_version = nccl_version != 0 ? nccl_version : 22809;
              serve(parent, ranks);
          }} {
        port_ = process_.to().take<int>();
    }
    [[nodiscard]] std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
    [[nodiscard]] forked& process() noexcept { return process_; }

    [[nodiscard]] std::string version() const {
        return ask("GET", "/weight_info").at("weight_version").get<std::string>();
    }
    /// Whether it serves `weights` under `version`.
    [[nodiscard]] bool serves(std::uint64_t version_wanted, const small_weights& weights) const {
        const auto held =
            ask("POST", "/weight_checker", R"({"action":"checksum"})").at("checksums");
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
    [[nodiscard]] nlohmann::json ask(std::string_view method, std::string_view path,
                                     std::string_view body = {}) const {
        weightwire::http_sync_client client{url()};
        const auto answer = client
                                .request(method, path, {.bodies = {&body, 1}},
                                         weightwire::deadline::after(std::chrono::seconds{20}))
                                .front()
                                .answer;
        return nlohmann::json::parse(answer.body);
    }

private:
    static void serve(channel& parent, int ranks) {
        using namespace weightwire;
        std::vector<std::unique_ptr<parameter_table>> tables;
        std::vector<parameter_table*> sinks;
        for (int rank = 0; rank < ranks; ++rank) {
            tables.push_back(std::make_unique<parameter_table>(
                small_model(nccl_parameters, nccl_elements), parameter_table_options{}));
            sinks.push_back(tables.back().get());
        }
        worker_engine engine{host_nccl{}, sinks};
        worker_service service{engine};
        worker_server server{service, {}};
        server.start();
        parent.put(static_cast<int>(server.port()));
        for (;;) {
            try {
                static_cast<void>(parent.take<char>());
                return;
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

/// Chooses packed buffers so small that a round has several chunks.
inline host_nccl_info small_chunks(bool packed = true) {
    host_nccl_info info;
    info.packed = packed;
    info.packed_buffer_size_bytes = 20'000;
    return info;
}

inline auto clients_of(const std::vector<std::string>& urls) {
    return weightwire::fan_out_sync_client{weightwire::http_sync_clients(urls)};
}

/// A trainer in this process, with weights of its own.
struct nccl_trainer {
    explicit nccl_trainer(const std::vector<std::string>& urls, bool packed = true,
                          std::chrono::milliseconds init_budget = std::chrono::seconds{20})
        : engine{weightwire::trainer_init(small_chunks(packed), clients_of(urls), weights,
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

/// A trainer process: opens, says `o`, and sends rounds from 1 on as it is told; leaves the text of
/// its error.
inline forked nccl_trainer_process(const std::vector<std::string>& urls, group_fault fault) {
    return forked{[urls, fault](channel& parent) {
        fault.arm();
        nccl_trainer trainer{urls};
        parent.put('o');
        for (std::uint64_t version = 1;; ++version) {
            static_cast<void>(parent.take<char>());
            trainer.round(version);
            parent.put('r');
        }
    }};
}

}  // namespace tests
