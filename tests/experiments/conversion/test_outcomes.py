"""Names of tuned variants in words."""

from experiments.conversion import outcomes, smollm2, whisper_tuning


def test_all_variants_have_words():
    asked = {name for setting in whisper_tuning.SETTINGS for name in setting.variants}
    assert asked <= set(whisper_tuning.variants(6, 64))
    words = [outcomes.variant_label(name) for name in sorted(asked | set(smollm2.TUNED))]
    assert all(words) and len(set(words)) == len(words)
