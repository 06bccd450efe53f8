// SPDX-License-Identifier: Apache-2.0
// What the author of an incomplete backend reads.

#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/concepts/transport.hpp>

namespace mine {

using namespace weightwire;

struct backend {};

struct init_info {
    using backend = mine::backend;
    int rank = 0;
    std::string init_message() const { return "{}"; }
};

struct sender {
#ifndef EXPECT_FAIL_1  // expect: Transport: add a member type sender, constructible from init_info
    explicit sender(const init_info&) {}
#endif
#ifndef EXPECT_FAIL_2  // expect: Transport: the sender needs prepare(const sender_context&) returning std::vector<transport_init>
    std::vector<transport_init> prepare(const sender_context&) { return {}; }
#endif
#ifndef EXPECT_FAIL_3  // expect: Transport: the sender needs open(deadline, std::stop_token)
    void open(deadline, std::stop_token) {}
#endif
#ifndef EXPECT_FAIL_4  // expect: Transport: the sender needs parts() const returning a span of update_part
    std::span<const update_part> parts() const { return {}; }
#endif
#ifndef EXPECT_FAIL_5  // expect: Transport: the sender needs send(std::uint64_t round, std::size_t part, tensor_stream&, deadline, std::stop_token)
    void send(std::uint64_t, std::size_t, tensor_stream&, deadline, std::stop_token) {}
#endif
#ifdef EXPECT_FAIL_6  // expect: Transport: the sender needs close(deadline)
    void close() {}  // waits for ever
#else
    void close(deadline) {}
#endif
#ifdef EXPECT_FAIL_14  // expect: Transport: a sender with export_memory needs stage(std::uint64_t round, std::size_t part, tensor_stream&, deadline, std::stop_token), shared_plan() const and adopt_plan(std::string_view) too
    std::string export_memory(const sender_context&) { return {}; }  // and nothing to share
#endif
};

struct receiver {
#ifndef EXPECT_FAIL_7  // expect: Transport: add a member type receiver, constructible from receiver_context
    explicit receiver(const receiver_context&) {}
#endif
#ifndef EXPECT_FAIL_8  // expect: Transport: the receiver needs open(const transport_open&, deadline, std::stop_token)
    void open(const transport_open&, deadline, std::stop_token) {}
#endif
#ifndef EXPECT_FAIL_9  // expect: Transport: the receiver needs receive(const update_message&, update_target&, deadline, std::stop_token)
    void receive(const update_message&, update_target&, deadline, std::stop_token) {}
#endif
#ifdef EXPECT_FAIL_10  // expect: Transport: the receiver needs release() noexcept
    void release() {}  // may throw
#else
    void release() noexcept {}
#endif
};

}  // namespace mine

template <>
struct weightwire::backend_traits<mine::backend> {
#ifndef EXPECT_FAIL_11  // expect: Transport: add static constexpr std::string_view wire_name to backend_traits
    static constexpr std::string_view wire_name = "mine";
#endif
#ifndef EXPECT_FAIL_12  // expect: Transport: add static constexpr transport_capabilities capabilities to backend_traits
    static constexpr transport_capabilities capabilities{.host_memory = true};
#endif
#ifdef EXPECT_FAIL_13  // expect: Transport: add a member type init_info that models TrainerInitInfo
    using init_info = int;
#else
    using init_info = mine::init_info;
#endif
    using sender = mine::sender;
    using receiver = mine::receiver;
};

static_assert(weightwire::explain_transport<mine::backend>());
