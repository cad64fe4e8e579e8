"""Google's buckets as folders; imports nothing else of the tests, for processes of their own."""

from fsspec.implementations import dirfs


class Buckets(dirfs.DirFileSystem):
    """A file system of Google's buckets, each a subfolder of one folder."""

    def _join(self, path):
        if isinstance(path, str):
            path = path.removeprefix("gs://")
        return super()._join(path)
