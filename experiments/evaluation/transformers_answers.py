"""Answers agreement.py's questions with transformers, in an environment without kvjax."""

import json
import sys

import torch
import transformers


def main(folder: str, questions_file: str, answers_file: str) -> None:
    """Reads questions from one JSON file and writes answers to another.

    letters: [message, [letter, ...]] -> prompt ids and logits of the letters.
    continuations: [message, answer] -> log-likelihood and number of the answer's tokens.
    texts: message -> ids of a greedy answer of up to `num_tokens` tokens.
    """
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with open(questions_file) as file:
        questions = json.load(file)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt(message: str) -> list[int]:
        chat = [dict(role="user", content=message)]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return encode(text)

    def last_logits(ids: list[int], count: int) -> torch.Tensor:
        return model(torch.tensor([ids]), logits_to_keep=count).logits[0]

    result = dict(letters=[], continuations=[], texts=[])
    with torch.no_grad():
        for message, letters in questions["letters"]:
            ids = prompt(message)
            (candidates,) = zip(*(encode(letter) for letter in letters), strict=True)
            logits = last_logits(ids, 1)[0][list(candidates)].tolist()
            result["letters"].append(dict(ids=ids, logits=logits))
        print("letters are done", file=sys.stderr, flush=True)
        for message, answer in questions["continuations"]:
            context, answer_ids = prompt(message), encode(answer)
            rows = torch.log_softmax(
                last_logits([*context, *answer_ids[:-1]], len(answer_ids)), dim=-1
            )
            total = rows.gather(1, torch.tensor(answer_ids)[:, None]).double().sum().item()
            result["continuations"].append(dict(log_likelihood=total, tokens=len(answer_ids)))
        print("continuations are done", file=sys.stderr, flush=True)
        for message in questions["texts"]:
            ids_BT = torch.tensor([prompt(message)])
            ids_and_answer_BT = model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                do_sample=False,
                max_new_tokens=questions["num_tokens"],
                pad_token_id=0,
            )
            result["texts"].append(ids_and_answer_BT[0, ids_BT.shape[1] :].tolist())
    versions = dict(torch=torch.__version__, transformers=transformers.__version__)
    with open(answers_file, "w") as file:
        json.dump(result | dict(versions=versions), file)
