#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/nccl/meeting.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/rendezvous/tcp_store_client.hpp>
#include <weightwire/rendezvous/tcp_store_server.hpp>
#include <weightwire/wire/reply_failure.hpp>
#include <weightwire/wire/unique_id.hpp>

#include "host_machinery.hpp"
#include "small_model.hpp"

/// @file
/// A trainer that speaks as vLLM's own does, without our sender and engine: bodies written by hand,
/// the id in a store, broadcasts one after another.

namespace tests {

/// Of one server. `packing` is `false`, `true` (said at init), or `by update` (said in each
/// update).
class vllm_form_trainer {
public:
    vllm_form_trainer(const std::string& url, int world_size, std::string packing)
        : client_{url}, world_size_{world_size}, packing_{std::move(packing)} {}
    vllm_form_trainer(const vllm_form_trainer&) = delete;
    vllm_form_trainer& operator=(const vllm_form_trainer&) = delete;

    /// This process ends at a step: `store` (it is there), `posted` (init, and nobody joins),
    /// `joined`, `warm`, `started`, `asked` (update, before a broadcast), `some` (broadcasts),
    /// `updated`.
    void die_at(std::string_view step) { dies_ = step; }

    [[nodiscard]] static std::string init_body(int port, int world_size,
                                               const std::string& packing) {
        nlohmann::json info{{"master_address", "127.0.0.1"},
                            {"master_port", port},
                            {"rank_offset", 1},
                            {"world_size", world_size}};
        if (packing == "true") {
            info.update(packed());
        }
        return nlohmann::json{{"init_info", std::move(info)}}.dump();
    }

    /// @throws error what the server answered, or the group.
    void open() {
        const auto id = machinery_.make_unique_id();
        auto writer =
            weightwire::rendezvous::tcp_store_client::connect("127.0.0.1", store_.port(), soon());
        writer.set(weightwire::nccl::unique_id_key, weightwire::wire::pickle_of(id), soon());
        meet("store");
        beside("/init_weight_transfer_engine", init_body(store_.port(), world_size_, packing_),
               [&] {
                   meet("posted");
                   group_.emplace(machinery_.join(id, world_size_, 0, soon(), {}));
                   meet("joined");
                   group_->warm_up(soon(), {});
               });
        meet("warm");
    }

    /// @throws error what the server answered, or the group.
    void round(const small_weights& weights, std::uint64_t version) {
        post("/start_weight_update", "{}");
        meet("started");
        beside("/update_weights", update_body(weights), [&] {
            meet("asked");
            std::size_t sent = 0;
            for (auto& bytes : buffers_of(weights)) {
                group_->broadcast(bytes.data(), bytes.size(), weightwire::nccl_api::element::uint8,
                                  0, stream_, soon(), {});
                auto done = machinery_.make_event();
                machinery_.record(done, stream_);
                group_->wait(done, soon(), {});
                if (++sent == 2) {
                    meet("some");
                }
            }
        });
        meet("updated");
        post("/finish_weight_update",
             nlohmann::json{{"weight_version", std::to_string(version)}}.dump());
    }

private:
    static constexpr std::uint64_t buffer_bytes = 20'000;

    [[nodiscard]] static weightwire::deadline soon() {
        return weightwire::deadline::after(std::chrono::seconds{10});
    }
    [[nodiscard]] static nlohmann::json packed() {
        return {{"packed", true},
                {"packed_buffer_size_bytes", buffer_bytes},
                {"packed_num_buffers", 2}};
    }
    void meet(std::string_view step) const {
        if (step == dies_) {
            // What it has sent arrives, and is waited with.
            std::this_thread::sleep_for(std::chrono::milliseconds{100});
            ::_exit(86);
        }
    }
    void post(std::string_view path, std::string_view body) {
        const auto replies = client_.request("POST", path, {.bodies = {&body, 1}}, soon());
        if (const auto why =
                weightwire::wire::reply_failure(replies.front(), weightwire::phase::update)) {
            why.raise();
        }
    }
    /// Posts while `work` runs. What the server says is worth more than what the group says.
    template <class Work>
    void beside(std::string_view path, const std::string& body, Work work) {
        weightwire::failure said;
        weightwire::failure met;
        std::thread call{[&] {
            try {
                post(path, body);
            } catch (...) {
                said = weightwire::failure::current(weightwire::phase::update);
            }
        }};
        try {
            work();
        } catch (...) {
            met = weightwire::failure::current(weightwire::phase::update);
        }
        call.join();
        for (const auto& why : {said, met}) {
            if (why) {
                why.raise();
            }
        }
    }

    [[nodiscard]] std::string update_body(const small_weights& weights) const {
        nlohmann::json info{{"names", nlohmann::json::array()},
                            {"dtype_names", nlohmann::json::array()},
                            {"shapes", nlohmann::json::array()}};
        for (const auto& parameter : weights.metadata()) {
            info["names"].push_back(parameter.name);
            info["dtype_names"].push_back("float32");
            info["shapes"].push_back({parameter.shape[0]});
        }
        if (packing_ == "by update") {
            info.update(packed());
        }
        return nlohmann::json{{"update_info", std::move(info)}}.dump();
    }
    /// One a tensor, or as many together as vLLM packs: until there is more than fits.
    [[nodiscard]] std::vector<std::vector<std::byte>> buffers_of(
        const small_weights& weights) const {
        std::vector<std::vector<std::byte>> out;
        for (const auto& each : weights.weights()) {
            if (packing_ == "false" || out.empty() || out.back().size() > buffer_bytes) {
                out.emplace_back();
            }
            const auto bytes = each.tensor.bytes();
            out.back().insert(out.back().end(), bytes.begin(), bytes.end());
        }
        return out;
    }

    weightwire::http_sync_client<> client_;
    int world_size_;
    std::string packing_;
    std::string_view dies_{};
    weightwire::rendezvous::tcp_store_server store_{};
    host_machinery machinery_{0, {}};
    host_machinery::stream stream_ = machinery_.make_stream();
    std::optional<host_machinery::communicator> group_;
};

}  // namespace tests
