// SPDX-License-Identifier: Apache-2.0
// What the author of an incomplete sync client reads.

#include <cstddef>
#include <stop_token>
#include <string_view>
#include <vector>

#include <weightwire/concepts/sync_client.hpp>

using weightwire::control_message;
using weightwire::deadline;
using replies = std::vector<weightwire::peer_reply>;

struct client {
#ifndef EXPECT_FAIL_1  // expect: SyncClient: add const members peer_count() and peer_name(std::size_t)
    std::size_t peer_count() const { return 1; }
#endif
#ifndef EXPECT_FAIL_2  // expect: SyncClient: add const members peer_count() and peer_name(std::size_t)
    std::string_view peer_name(std::size_t) const { return "server"; }
#endif
#ifndef EXPECT_FAIL_3  // expect: SyncClient: add init(const control_message&, deadline, std::stop_token) returning
    replies init(const control_message&, deadline, std::stop_token) { return {}; }
#endif
#ifndef EXPECT_FAIL_4  // expect: SyncClient: add start(const control_message&, deadline, std::stop_token) returning
    replies start(const control_message&, deadline, std::stop_token) { return {}; }
#endif
#ifndef EXPECT_FAIL_5  // expect: SyncClient: add update(const control_message&, deadline, std::stop_token)
    replies update(const control_message&, deadline, std::stop_token) { return {}; }
#endif
#ifdef EXPECT_FAIL_6  // expect: SyncClient: add finish(const control_message&, deadline, std::stop_token)
    // One reply for all peers would hide who failed.
    weightwire::peer_reply finish(const control_message&, deadline, std::stop_token) { return {}; }
#else
    replies finish(const control_message&, deadline, std::stop_token) { return {}; }
#endif
};

static_assert(weightwire::explain_sync_client<client>());
