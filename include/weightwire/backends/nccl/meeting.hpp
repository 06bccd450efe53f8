#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/nccl/init_info.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/rendezvous/tcp_store_client.hpp>
#include <weightwire/rendezvous/tcp_store_server.hpp>
#include <weightwire/wire/unique_id.hpp>
#include <weightwire/wire/vllm_nccl.hpp>

/// @file
/// How ranks behind vLLM servers learn NCCL's unique id: in the init call, or from a store of the
/// trainer's. Ranks of our own workers are told it in the native init.

namespace weightwire::nccl {

/// Where vLLM's first broadcast of an object lies (vLLM wire section 2.4), with the prefix of user
/// keys.
inline constexpr std::string_view unique_id_key = "/broadcast_from/0/0";

/// The id of one group and, where it is wanted, the store that holds it. Owner of the store, whose
/// clients are idle after the join but stay connected.
class meeting {
public:
    meeting() = default;

    /// Starts the store where a peer may need it. In `automatic` a store that cannot be, or that
    /// the peers could not reach, is done without: `description()` says so.
    /// @throws resource_error, usage_error `store` was asked for and cannot be.
    [[nodiscard]] static meeting of(const trainer_init_info& info, const wire::unique_id& id,
                                    std::span<const peer_info> peers) {
        meeting made;
        made.id_ = id;
        made.by_id_ = info.meeting != rendezvous::store;
        bool wanted = false;
        std::string unreached;
        for (const auto& peer : peers) {
            wanted = wanted || (!peer.native && info.meeting != rendezvous::unique_id);
            if (!peer.native && store_out_of_reach(info.master_address, peer.name)) {
                unreached = peer.name;
            }
        }
        if (!wanted) {
            return made;
        }
        try {
            if (!unreached.empty()) {
                throw usage_error{
                    "a store at master_address " + info.master_address +
                        " cannot be reached from there; give the address by which workers reach "
                        "this machine",
                    {.phase = phase::init, .peer = unreached, .backend = "nccl"}};
            }
            made.start_store(info);
        } catch (const error& failed) {
            if (info.meeting == rendezvous::store) {
                throw;
            }
            made.store_ = nullptr;
            made.without_store_ = failed.text();
        }
        return made;
    }

    /// `init_info` for `peer`, newest form first.
    [[nodiscard]] std::vector<vllm_form> forms(const peer_info& peer, int world_size,
                                               const wire::nccl_packing& packing) const {
        wire::vllm_nccl_init init{
            .rank_offset = peer.rank_offset, .world_size = world_size, .packing = packing};
        std::vector<vllm_form> out;
        const auto add = [&](wire::vllm_nccl_form form) {
            out.push_back({.init_info = wire::encode_nccl_init(init, form),
                           .update_body = wire::update_body_of(form)});
        };
        if (by_id_) {
            init.id = id_;
            add(wire::vllm_nccl_form::by_id);
        }
        if (store_ != nullptr) {
            init.store = wire::store_address{.host = host_, .port = store_->port()};
            add(wire::vllm_nccl_form::by_store);
            add(wire::vllm_nccl_form::packed_by_update);
        }
        return out;
    }

    /// What to tell of a server that refuses the last of `forms`; empty where none is left out.
    [[nodiscard]] std::string missing_form() const {
        return without_store_.empty()
                   ? std::string{}
                   : "releases below 0.30 learn the id from the trainer's store, "
                     "which was left out: " +
                         without_store_;
    }

    /// Of the store; 0 where there is none.
    [[nodiscard]] std::uint16_t port() const noexcept {
        return store_ != nullptr ? store_->port() : std::uint16_t{0};
    }
    /// One clause for people; empty where nobody needs to meet.
    [[nodiscard]] std::string description() const {
        if (store_ != nullptr) {
            return std::string{by_id_ ? "id in the init call, or " : "id "} + "from the store at " +
                   host_ + ":" + std::to_string(store_->port());
        }
        return without_store_.empty() ? std::string{}
                                      : "id only in the init call, no store: " + without_store_;
    }

private:
    /// Local calls take milliseconds; the store answers from its own thread.
    static constexpr std::chrono::seconds local_budget{10};

    void start_store(const trainer_init_info& info) {
        const auto until = deadline::after(local_budget);
        host_ = info.master_address;
        store_ = std::make_unique<rendezvous_server>(
            weightwire::rendezvous::tcp_store_options{
                .address = host_, .port = static_cast<std::uint16_t>(info.master_port)},
            until);
        auto client = weightwire::rendezvous::tcp_store_client::connect(host_, port(), until);
        client.set(unique_id_key, wire::pickle_of(id_), until);
        // The protocol does not answer a `set`; that it can be read shows that it is there.
        static_cast<void>(client.get(unique_id_key, until));
    }

    using rendezvous_server = weightwire::rendezvous::tcp_store_server;

    wire::unique_id id_{};
    bool by_id_ = true;
    std::string host_;
    std::string without_store_;
    std::unique_ptr<rendezvous_server> store_;
};

}  // namespace weightwire::nccl
