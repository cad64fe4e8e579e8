"""The authors' repositories that kvjax is compared with, each at a fixed commit."""

import dataclasses
import pathlib
import subprocess

from kvjax.foundation.errors import UserError


@dataclasses.dataclass(frozen=True)
class Peer:
    """Owner and pinned commit of a repository in `PEERS`."""

    owner: str
    commit: str  # the first 7 digits

    def name(self, repository: str) -> str:
        """Returns the name that the table shows, with its commit."""
        return f"{self.owner}/{repository} at {self.commit}"

    def check(self, folder: pathlib.Path) -> None:
        """Raises a UserError unless `folder` is an unchanged clone at the pinned commit."""
        head = _git(folder, "rev-parse", "HEAD") if (folder / ".git").exists() else "missing"
        if not head.startswith(self.commit):
            url = f"https://github.com/{self.owner}/{folder.name}"
            raise UserError(
                f"--peers: {folder} is {head[:7]}, must be a clone at {self.commit}: git clone "
                f"{url} {folder}; git -C {folder} fetch && git -C {folder} checkout {self.commit}"
            )
        if _git(folder, "status", "--porcelain", "--untracked-files=no"):
            restore = f"git -C {folder} restore --staged --worktree ."
            raise UserError(f"{folder} has changed files: {restore}")


PEERS = {  # peers by name of the repository
    "MLRA": Peer("SongtaoLiu0823", "7e0eb5c"),
    "TPA": Peer("tensorgi", "3d7f51d"),
    "grouped-latent-attention": Peer("Dao-AILab", "17889db"),
    "Do-Transformers-Need-3-Projections": Peer("Brainchip-Inc", "ffedd92"),
    "nanochat": Peer("karpathy", "0f00788"),
}


def _git(folder: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", folder, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{folder}: git cannot read it ({done.stderr.strip()})")
    return done.stdout.strip()
