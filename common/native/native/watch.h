// Whether the weights that constants were computed from are unchanged.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "call.h"

namespace fusewright::native {

// watch(arguments) -> whether the tensors at `places` are the objects that it was created with, at the same addresses and versions,
// and those at `moving` have the same addresses. It keeps no references to them. Null with an error set.
std::unique_ptr<Body> watch(PyObject* arguments, const std::vector<Py_ssize_t>& places, const std::vector<Py_ssize_t>& moving);

// words() -> whether the words at (address, bytes: 1, 2, 4 or 8) are unchanged. The memory must still be allocated.
std::unique_ptr<Body> words(const std::vector<std::pair<std::uintptr_t, int>>& places);

// Whether dicts, lists and classes hold exactly these entries, by identity: `containers` and `entries` are tuples, and all but lists
// have two entries for each key, which are the key and its value. With `ids`, entries are the ids of values alone. -1 with an error set.
int same_entries(PyObject* containers, PyObject* entries, bool ids);

}  // namespace fusewright::native
