"""Google's buckets as folders: for processes that read nothing else of the tests."""

from fsspec.implementations import dirfs


class Buckets(dirfs.DirFileSystem):
    """Google's buckets as the folders of a folder."""

    def _join(self, path):
        if isinstance(path, str):
            path = path.removeprefix("gs://")
        return super()._join(path)
