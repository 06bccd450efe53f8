// SPDX-License-Identifier: Apache-2.0
//
// Our store, or our client, for a test in another language.
//
//   test_store serve          prints its port, serves until its input ends
//   test_store ask HOST PORT  speaks to another store; prints what it read, ends with 1 when that
//                             was not what it should be

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/rendezvous/tcp_store_client.hpp>
#include <weightwire/rendezvous/tcp_store_server.hpp>

namespace {

using namespace weightwire;
using namespace weightwire::rendezvous;

deadline soon() { return deadline::after(std::chrono::seconds{20}); }

int serve() {
    const tcp_store_server server;
    std::printf("%u\n", static_cast<unsigned>(server.port()));
    std::fflush(stdout);
    while (std::getchar() != EOF) {
    }
    const auto counts = server.counts();
    for (std::size_t i = 1; i < counts.dropped.size(); ++i) {
        if (counts.dropped[i] != 0) {
            const auto reason = std::string{to_string(static_cast<drop_reason>(i))};
            std::fprintf(stderr, "dropped: %s\n", reason.c_str());
            return 1;
        }
    }
    return 0;
}

bool expect(const char* what, bool holds) {
    std::printf("%s %s\n", holds ? "ok" : "WRONG", what);
    return holds;
}

int ask(const std::string& host, std::uint16_t port) {
    auto client = tcp_store_client::connect(host, port, soon());
    const std::vector<std::string> names{"/x", "/y"};
    bool all = expect("announce", client.announce(soon()) >= 1);
    all &= expect("get what the other side has set", client.get("/greeting", soon()) == "hello");
    client.set("/x", "1", soon());
    all &= expect("add", client.add("/x", 41, soon()) == 42);
    all &= expect("compare_set", client.compare_set("/y", "", "new", soon()) == "new");
    all &= expect("multi_get",
                  client.multi_get(names, soon()) == std::vector<std::string>{"42", "new"});
    all &= expect("check", client.check(names, soon()));
    all &= expect("number_of_keys", client.number_of_keys(soon()) >= 4);
    all &= expect("delete_key", client.delete_key("/y", soon()));
    try {
        client.wait({&names[1], 1}, deadline::after(std::chrono::milliseconds{200}));
        all = expect("a wait for a missing key ends", false);
    } catch (const timeout_error&) {
        all &= expect("a wait for a missing key ends", true);
    }
    client.ping(soon());
    client.set("/done", "yes", soon());
    client.ping(soon());
    return all ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
    const std::vector<std::string> words{arguments + 1, arguments + count};
    try {
        if (words == std::vector<std::string>{"serve"}) {
            return serve();
        }
        if (words.size() == 3 && words.front() == "ask") {
            return ask(words[1], static_cast<std::uint16_t>(std::stoi(words[2])));
        }
    } catch (const std::exception& caught) {
        std::fprintf(stderr, "%s\n", caught.what());
        return 1;
    }
    std::fprintf(stderr, "usage: test_store serve | test_store ask HOST PORT\n");
    return 2;
}
