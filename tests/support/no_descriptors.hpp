#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <vector>

namespace weightwire::test_support {

/// While it lives, this process can open no file: the limit is low and reached.
class no_descriptors {
public:
    no_descriptors() {
        // The undefined-behavior sanitizer looks at an object's type through a pipe when it meets
        // the type first, and calls it invalid where there can be no pipe.
        static_cast<void>(std::generic_category().message(EMFILE));
        ::getrlimit(RLIMIT_NOFILE, &before_);
        // Not 0: poll() refuses more entries than the limit says.
        const rlimit low{.rlim_cur = 64, .rlim_max = before_.rlim_max};
        ::setrlimit(RLIMIT_NOFILE, &low);
        for (int one = 0; (one = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) {
            taken_.push_back(one);
        }
    }
    no_descriptors(const no_descriptors&) = delete;
    no_descriptors& operator=(const no_descriptors&) = delete;
    ~no_descriptors() {
        for (const int each : taken_) {
            ::close(each);
        }
        ::setrlimit(RLIMIT_NOFILE, &before_);
    }

private:
    rlimit before_{};
    std::vector<int> taken_;
};

}  // namespace weightwire::test_support

// For files that do not use namespace weightwire.
namespace test_support = weightwire::test_support;
