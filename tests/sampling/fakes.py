"""Small stand-ins with exactly the protocols of libraries that are not installed here."""

import numpy as np

from tests.refusing import refused


def ask(source, *indices):
    return source.gather(np.array(indices, np.int32), np.ones(len(indices), bool))


def refused_without(private, words, call, *args, **options):
    """Refused in these words, and in none that fit the pattern of what is private."""
    refused(rf"(?s)^(?!.*({private})).*({words})", call, *args, **options)


class MapDataset:
    """torch's map-style dataset: a tuple per index."""

    def __init__(self, size=7):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert type(index) is int
        if not 0 <= index < self.size:
            raise IndexError("out of range")
        self.asked.append(index)
        return Tensor(np.full((2, 2), index, np.float32)), index


class Tensor:
    """A tensor that NumPy cannot read by itself."""

    def __init__(self, array):
        self._array, self.shape, self.dtype = array, array.shape, "torch.float32"

    def __array__(self, *_, **__):
        raise TypeError("use .numpy()")

    def numpy(self):
        return self._array


class HuggingFace:
    """``datasets.Dataset``: a list of indices gives a dict of lists, ``__getitems__`` records."""

    def __init__(self, columns):
        self._columns, self.batches = columns, []

    column_names = property(lambda self: list(self._columns))
    shape = property(lambda self: (len(self), len(self._columns)))

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key):
        if isinstance(key, int):
            return {name: column[key] for name, column in self._columns.items()}
        if isinstance(key, str):
            return self._columns[key]
        return {name: [column[i] for i in key] for name, column in self._columns.items()}

    def __getitems__(self, keys):
        assert type(keys) is list
        self.batches.append(keys)
        batch = self[keys]
        return [{name: column[i] for name, column in batch.items()} for i in range(len(keys))]


class GrainRange:
    """``grain.sources.RangeDataSource``."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, record_key):
        record_key = record_key.__index__()
        if record_key < 0 or record_key >= self.size:
            raise IndexError(f"Index {record_key} out of range for {self.size}")
        return record_key


class H5:
    """h5py's dataset: indices must ascend without repetition; counts what was read."""

    def __init__(self, array):
        self._array, self.read = array, 0

    shape = property(lambda self: self._array.shape)
    dtype = property(lambda self: self._array.dtype)

    def __len__(self):
        return len(self._array)

    def __array__(self, *_, **__):
        raise AssertionError("read whole")

    def __getitem__(self, indices):
        if not (np.diff(indices) > 0).all():
            raise TypeError("Indexing elements must be in increasing order")
        self.read += len(indices)
        return self._array[indices]
