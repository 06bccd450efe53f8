// SPDX-License-Identifier: Apache-2.0
// What the author of an incomplete HTTP client reads.

#include <stop_token>
#include <string_view>

#include <weightwire/concepts/http_client.hpp>

using namespace weightwire;

struct client {
#ifndef EXPECT_FAIL_1  // expect: HttpClient: add exchange(const weightwire::http_call&, weightwire::deadline, std::stop_token) returning
    http_answer exchange(const http_call&, deadline, std::stop_token) { return {}; }
#endif
#ifndef EXPECT_FAIL_2  // expect: HttpClient: add url() naming the server
    std::string_view url() const { return "http://server"; }
#endif
};

static_assert(explain_http_client<client>());
