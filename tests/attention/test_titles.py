"""Titles of mechanisms: the field's name, and the size that its cache depends on."""

import pytest

NAMES = {
    "mha": "MHA",
    "lrkv_gqa": "LRKV over 2 bases, 4 KV heads, rank 3",
    "thin_keys": "GQA, 2 KV heads, keys of 4",
    "factored_values": "low rank, keys whole, values 3",
    "qk_tied": "Q=K-V, MHA",
    "qkv_tied_plus": "(Q=K=V)+, MHA",
    "kv_tied_gqa": "Q-K=V, GQA, 2 KV heads",
    "mla": "MLA, latent 10",
    "mla_lrkv": "LRKV over a latent of 6, rank 3",
    "mla_paper": "MLA without a RoPE key, latent 10",
    "mfa": "MFA, queries of rank 5",
    "gla": "GLA-2, latents 6",
    "mlra": "MLRA-2, latents 6",
    "gta": "GTA, 2 KV heads",
    "shared_kv": "shared KV, 2 KV heads",
    "mfa_kr": "MFA-KR, 2 KV heads",
    "tpa": "TPA, ranks 2 and 3",
}


@pytest.mark.parametrize("name", NAMES)
def test_title(make_mechanism, name):
    assert make_mechanism(name).title == NAMES[name]


def test_titles_name_low_rank_queries(make_mechanism):
    for name, title in (("gqa", "GQA, 2 KV heads"), ("lrkv", "LRKV, rank 3")):
        assert make_mechanism(name, query_rank=5).title == f"{title}, queries of rank 5"
