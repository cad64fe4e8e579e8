"""Tasks of all kinds as local YAML files with local data; imported without kvjax too."""

import json
import pathlib

MAX_LENGTH = 48  # tokens that the models read: some contexts below are longer
_LONG = "the cat sat on the mat and the dog ran to the red barn with a ball and a bone. "

QUESTIONS = [
    dict(question="the cat sat on the", choices=[" mat", " dog", " red barn"], label=0),
    dict(question="a dog and a", choices=[" b", " bone with a ball", " the"], label=1),
    dict(question="", choices=["the", " barn", "a ball"], label=0),
    dict(question="   ", choices=["mat", "sat"], label=1),
    dict(question=_LONG * 3, choices=[" the", " ran", " and the dog ran"], label=1),
    dict(question="Question: which?\nA) a\nB) b\nAnswer:", choices=[" A", " B"], label=1),
    dict(question="one \u2603 two", choices=[" \u2603", " caf\u00e9"], label=0),
    dict(question="on the mat ", choices=["dog", "cat ran"], label=0),
    dict(question=_LONG, choices=[f" {_LONG[:40]}", " x"], label=1),
]
ENDINGS = [
    dict(text="the dog ran to the", ending=" red"),
    dict(text="a ball and a", ending=" bone with the cat"),
    dict(text=_LONG * 2, ending=" mat"),
    dict(text="", ending="cat"),
]
TEXTS = [
    dict(text="the cat sat on the mat"),
    dict(text=_LONG * 4),
    dict(text="x"),
    dict(text="\u2603 a dog\n\nran " * 7),
]
PROMPTS = [
    dict(prompt="the cat", answer=" sat"),
    dict(prompt="a", answer=" ball"),
    dict(prompt=_LONG * 2, answer=" the"),
    dict(prompt="the dog ran to", answer=" the"),
    dict(prompt="", answer="the"),
]
_CHOICES = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
_ENDINGS = """
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: "{{ending}}"
target_delimiter: ""
metric_list: [{metric: perplexity}, {metric: acc}]
"""
_TEXTS = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
_PROMPTS = """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [UNTIL, "no such text"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TASKS = {
    "local_choices": (QUESTIONS, _CHOICES),
    "local_endings": (ENDINGS, _ENDINGS),
    "local_texts": (TEXTS, _TEXTS),
    "local_prompts": (PROMPTS, _PROMPTS),
}


def write(folder: pathlib.Path, until: str = "none has this") -> pathlib.Path:
    """Writes the tasks and their data.

    Args:
      until: a text that generation stops before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, (rows, yaml) in TASKS.items():
        add(folder, name, rows, yaml.replace("UNTIL", json.dumps(until)))
    return folder


def add(folder: pathlib.Path, name: str, rows: list[dict], yaml: str) -> None:
    """Adds a task."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
    head += f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
    (folder / f"{name}.yaml").write_text(head + yaml)
