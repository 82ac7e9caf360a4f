"""Small benchmarks in the form in which the published ones come, with questions of our own."""

import json

THINGS = ("cat", "dog", "mat", "log", "egg", "cup", "bell", "road")
VERBS = ("sat on", "looked at", "ran to", "jumped over")
SUBJECTS = ("anatomy", "astronomy")


def write_benchmarks(folder, *, questions=20):
    """HellaSwag- and MMLU-like files: DATASET/[SUBSET/]SPLIT.jsonl."""
    _write(folder / "hellaswag/validation.jsonl", [_ending(n) for n in range(questions)])
    _write(folder / "hellaswag/train.jsonl", [_ending(n + 100) for n in range(6)])
    for offset, subject in enumerate(SUBJECTS):
        asked = [_question(3 * n + offset, subject) for n in range(questions)]
        _write(folder / "mmlu" / subject / "test.jsonl", asked)
        _write(folder / "mmlu" / subject / "dev.jsonl", [_question(n, subject) for n in range(5)])
    return folder


def write_subjects(folder, subjects):
    """MMLU-like test files of two or three questions a subject, without solved examples."""
    for number, subject in enumerate(subjects):
        asked = [_question(3 * n + number, subject) for n in range(2 + number % 2)]
        _write(folder / "mmlu" / subject / "test.jsonl", asked)
    return folder


def write_texts(path):
    """Documents of several lengths, two of them longer than the model's context."""
    lengths = (3, 40, 9, 1, 17, 60)
    texts = (
        " ".join(_sentence(number + place) for place in range(length))
        for number, length in enumerate(lengths)
    )
    _write(path, [{"text": text} for text in texts])
    return path


def _sentence(number):
    first, second = THINGS[number % 8], THINGS[(number // 3) % 8]
    return f"The {first} {VERBS[number % 4]} the {second}."


def _ending(number):
    context = f"The {THINGS[number % 8]} {VERBS[number % 4]} the {THINGS[(number + 3) % 8]}. Then"
    endings = [f"the {THINGS[(number + k) % 8]} {VERBS[(number + k) % 4]}{' it' * k}." for k in range(4)]  # fmt: skip
    return {
        "ind": number, "activity_label": "Playing", "ctx_a": context, "ctx_b": "", "ctx": context,
        "endings": endings, "source_id": f"ours~{number}", "split": "val",
        "split_type": "indomain", "label": str(number * 7 % 4),
    }  # fmt: skip


def _question(number, subject):
    return {
        "question": f" How many cups are {number} cups and {number % 5} cups?",
        "subject": subject,
        "choices": [str(number + number % 5 + k) for k in range(4)],
        "answer": number * 5 % 4,
    }


def _write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
