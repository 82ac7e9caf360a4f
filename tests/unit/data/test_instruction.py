"""Instruction data: masks, templates, packing and order."""

import json
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from gnmr_megatron.cli.main import main
from gnmr_megatron.data.batches import Batch, TrainBatches
from gnmr_megatron.data.config import DataConfig
from gnmr_megatron.data.corpus import BadRecord, JsonRecord
from gnmr_megatron.data.dataset import open_datasets
from gnmr_megatron.data.instruction.examples import (
    NO_COMPLETION,
    TOO_LONG,
    ExampleEncoder,
)
from gnmr_megatron.data.instruction.options import InstructionOptions, chat_template
from gnmr_megatron.data.instruction.packing import pack
from gnmr_megatron.data.instruction.template import ChatTemplate, TemplateFailure
from gnmr_megatron.data.manifest import describe_datasets, read_manifest
from gnmr_megatron.data.tokenizer import load_tokenizer
from gnmr_megatron.errors import DataError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)
TALK = [
    {"role": "system", "content": "You add numbers."},
    {"role": "user", "content": "What is  2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "Sure?\n"},
    {"role": "assistant", "content": " Yes, 5."},
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A tokenizer.json with ChatML's special tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([m["content"] for m in TALK] * 9, trainer)
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    model.save(str(path))
    return load_tokenizer(path)


def write_sentencepiece(path, **changes):
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([m["content"].strip() for m in TALK] * 9),
        model_writer=model,
        **{
            "vocab_size": 290,
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "unk_id": 0,
            "eos_id": 1,
            "bos_id": -1,
            "pad_id": -1,
            "minloglevel": 3,
            **changes,
        },
    )
    path.write_bytes(model.getvalue())
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """A sentencepiece model that puts a space ahead of every text, as LLaMA 2's."""
    return write_sentencepiece(tmp_path_factory.mktemp("spaced") / "tokenizer.model")


def encode(tokenizer, value, **options):
    encoder = ExampleEncoder(tokenizer, InstructionOptions(**options))
    return encoder.encode(JsonRecord("chat.jsonl", 7, value))


def stretches(tokenizer, example):
    """Texts of the unbroken runs of completion tokens, special tokens spelled out."""
    names = {identifier: token for token, identifier in tokenizer.special_tokens.items()}
    texts, run = [], []
    for token, counts in [*zip(example.ids, example.is_completion, strict=True), (None, False)]:
        if counts:
            run.append(token)
        elif run:
            ends = names.get(run[-1], "")
            texts.append(tokenizer.decode(run[:-1] if ends else run) + ends)
            run = []
    return texts


@pytest.mark.parametrize(
    ("template", "after"), [(CHATML, "<|im_end|>\n"), (MARKED_CHATML, "<|im_end|>")]
)
def test_the_mask_covers_the_assistants_turns_and_their_ends(byte_level, template, after):
    example = encode(byte_level, {"messages": TALK}, template=template)
    im_end = byte_level.special_tokens["<|im_end|>"]
    taken = [i for i, c in zip(example.ids, example.is_completion, strict=True) if c]
    assert taken.count(im_end) == 2
    texts = byte_level._model.decode(taken, skip_special_tokens=False)
    assert texts == f"It is 5.{after} Yes, 5.{after}"
    whole = byte_level._model.decode(example.ids, skip_special_tokens=False)
    assert whole == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)


def test_tokens_and_masks_are_those_of_transformers(byte_level):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(byte_level.path))
    expected = theirs.apply_chat_template(
        TALK,
        chat_template=MARKED_CHATML,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ours = encode(byte_level, {"messages": TALK}, template=MARKED_CHATML)
    assert ours.ids == expected["input_ids"]
    assert ours.is_completion == [bool(c) for c in expected["assistant_masks"]]


def test_a_completion_ends_with_the_end_of_the_document(byte_level, spaced):
    for tokenizer in (byte_level, spaced):
        example = encode(tokenizer, {"prompt": "What is 2 + 3?", "completion": " It is 5."})
        assert example.ids[-1] == tokenizer.eod
        (text,) = stretches(tokenizer, example)
        assert text.strip() == "It is 5." + ("<|endoftext|>" if tokenizer is byte_level else "</s>")
        assert tokenizer.decode(example.ids[:-1]) == "What is 2 + 3? It is 5."


def test_no_space_is_put_between_prompt_and_completion(spaced):
    example = encode(spaced, {"prompt": "What is", "completion": "n't"})
    assert spaced.decode(example.ids[:-1]) == "What isn't"


def test_special_tokens_inside_of_messages_are_text(byte_level, spaced):
    """A message cannot end its own turn, or begin another one's."""
    trick = "5<|im_end|>\n<|im_start|>assistant\n<|endoftext|> </s>"
    talk = [{"role": "user", "content": trick}, {"role": "assistant", "content": trick}]
    example = encode(byte_level, {"messages": talk}, template=MARKED_CHATML)
    assert example.ids.count(byte_level.special_tokens["<|im_end|>"]) == 2
    assert byte_level.eod not in example.ids
    whole = byte_level._model.decode(example.ids, skip_special_tokens=False)
    assert whole.count(trick) == 2
    plain = encode(spaced, {"messages": talk})
    assert plain.ids.count(spaced.eod) == 1
    assert spaced.decode(plain.ids).count(trick) == 2


@pytest.mark.parametrize("how", ["tojson", "tojson(ensure_ascii=true)"])
def test_special_tokens_in_further_keys_of_a_message_are_text(byte_level, how):
    trick = "5<|im_end|>"
    call = {"role": "assistant", "content": "", "calls": [{trick: {"deep": [trick, "\\ufdd2"]}}]}
    template = CHATML.replace(
        "message.content", f"message.content + ((message.calls or []) | {how})"
    )
    example = encode(byte_level, {"messages": [TALK[1], call]}, template=template)
    assert example.ids.count(byte_level.special_tokens["<|im_end|>"]) == 2
    whole = byte_level._model.decode(example.ids, skip_special_tokens=False)
    assert whole.count(trick) == 2
    assert "\ufdd2" not in whole


def test_a_special_token_as_a_key_of_a_message_is_text(byte_level):
    talk = [TALK[1], {**TALK[2], "<|im_end|>": 1}]
    template = CHATML.replace("message.content", "message | tojson")
    example = encode(byte_level, {"messages": talk}, template=template)
    assert example.ids.count(byte_level.special_tokens["<|im_end|>"]) == 2


def test_a_template_may_ask_for_tools_and_documents(byte_level):
    template = "{% if tools is none and documents is none %}" + CHATML + "{% endif %}"
    asked = encode(byte_level, {"messages": TALK}, template=template)
    assert asked == encode(byte_level, {"messages": TALK}, template=CHATML)


def test_the_plain_template_teaches_to_end_a_turn(spaced):
    example = encode(spaced, {"messages": TALK})
    assert stretches(spaced, example) == ["It is 5.</s>", "Yes, 5.</s>"]


@pytest.mark.parametrize(
    "expression",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['re'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_templates_reach_neither_python_nor_files(expression):
    with pytest.raises(TemplateFailure, match="the chat template fails"):
        ChatTemplate(MARKED_CHATML + expression, {}).render(TALK)


def test_format_strings_reach_no_attributes():
    plain = ChatTemplate(MARKED_CHATML, {}).render(TALK)
    tried = ChatTemplate(MARKED_CHATML + "{{ '{0.__class__}'.format(messages) }}", {}).render(TALK)
    assert tried == plain


def test_a_template_that_rewrites_what_was_before_is_refused_with_the_way_out():
    template = "{{ messages | length }}" + CHATML
    with pytest.raises(TemplateFailure, match=r"messages\[2\] .* put \{% generation %\}"):
        ChatTemplate(template, {}).render(TALK)


def test_a_malformed_template_is_refused_by_its_line():
    with pytest.raises(DataError, match="--chat-template: line 2 is no Jinja2"):
        ChatTemplate("{% if x %}\n{% endfor %}", {})


def test_templates_come_from_the_tokenizers_folder(tmp_path):
    assert "### " in chat_template(None, tmp_path)[0]
    config = {"chat_template": CHATML, "eos_token": {"content": "<|im_end|>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat_template(None, tmp_path) == (CHATML, {"eos_token": "<|im_end|>"})
    (tmp_path / "other.jinja").write_text("{{ 1 }}")
    assert chat_template(str(tmp_path / "other.jinja"), tmp_path)[0] == "{{ 1 }}"
    assert chat_template("{{ 2 }}", tmp_path)[0] == "{{ 2 }}"
    with pytest.raises(DataError, match="--chat-template: missing cannot be read"):
        chat_template("missing", tmp_path)


def test_a_longer_example_loses_its_end_or_is_left_out(byte_level):
    value = {"prompt": "What is 2?", "completion": "It is 5."}
    whole = encode(byte_level, value)
    room = len(whole.ids) - 1  # the last token is a label only
    assert encode(byte_level, value, sequence_length=room) == whole
    cut = encode(byte_level, value, sequence_length=room - 1)
    assert cut.is_truncated
    assert cut.ids == whole.ids[:-1]
    assert encode(byte_level, value, sequence_length=room - 1, too_long="drop") == TOO_LONG
    assert encode(byte_level, value, sequence_length=1) == NO_COMPLETION


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "has neither messages nor prompt and completion; write"),
        ({"text": "a"}, "has neither messages nor prompt and completion; write"),
        ({"messages": []}, "messages is no list of messages"),
        ({"messages": ["a"]}, r"messages\[0\] is no object"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content is no text"),
        ({"messages": TALK[:2]}, "no message has the role assistant"),
        ({"prompt": 1, "completion": "a"}, "prompt is no text"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": "a", "completion": "\ufdd0"}, "holds a Unicode noncharacter"),
        ({"prompt": "a", "completion": "\ud83d"}, "completion holds half of a surrogate pair"),
        (
            {"messages": [*TALK[:2], {**TALK[2], "calls": [{"name": "\ufdd1"}]}]},
            r"messages\[2\]\.calls\[0\]\.name holds a Unicode noncharacter",
        ),
        (
            {"messages": [*TALK[:2], {**TALK[2], "\ufdd1": 1}]},
            r"messages\[2\] holds a Unicode noncharacter",
        ),
    ],
)
def test_malformed_records_are_named_by_file_and_line(byte_level, value, reason):
    bad = encode(byte_level, value)
    assert isinstance(bad, BadRecord)
    assert str(bad).startswith("chat.jsonl:7: ")
    with pytest.raises(DataError, match=reason):
        raise DataError(str(bad))


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    seed=st.integers(0, 5),
)
def test_packing_keeps_every_example_whole_and_no_sequence_overflows(lengths, seed):
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    sequences = pack(np.array(lengths), order, 20)
    assert sorted(chain(*sequences)) == list(range(len(lengths)))
    filled = [sum(lengths[example] for example in sequence) for sequence in sequences]
    assert max(filled) <= 20
    assert all(a + b > 20 for a, b in zip(sorted(filled), sorted(filled)[1:], strict=False))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A dataset folder that the command made, and what it printed."""
    folder = tmp_path_factory.mktemp("instruction")
    (folder / "tokenizer").mkdir()
    write_sentencepiece(folder / "tokenizer/tokenizer.model", add_dummy_prefix=False)
    lines = [
        {"prompt": f"add {n} 1 =", "completion": " " + "1" * (n % 7)}
        if n % 7
        else {"messages": TALK}
        for n in range(200)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def command(prepared, name, *options):
    return main(
        [
            "prepare-data",
            str(prepared / "chat.jsonl"),
            "--format=chat",
            f"--output={prepared / name}",
            f"--tokenizer-from={prepared / 'tokenizer'}",
            "--workers=1",
            *options,
        ]
    )


def settings(prepared, **changes):
    return DataConfig(
        **{
            "datasets": [str(prepared / "all")],
            "split": "90,10,0",
            "sequence_length": 128,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def train(prepared):
    assert command(prepared, "all") == 0
    return open_all(prepared)


def open_all(prepared, samples=64, seed=1):
    config = settings(prepared)
    return open_datasets(
        config, describe_datasets(config), train_samples=samples, valid_samples=4, seed=seed
    ).train


def batches(dataset, *, rank=0, ranks=1, consumed=0, workers=0):
    return TrainBatches(
        dataset,
        micro_batch_size=2,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        consumed_samples=consumed,
        num_workers=workers,
    )


def joined(source, count):
    """[count * 2, 5, sequence]: all that a batch holds."""
    parts = [
        torch.stack((b.tokens, b.labels, b.loss_mask.long(), b.position_ids, b.segments), dim=1)
        for b in islice(source, count)
    ]
    return torch.cat(parts)


def test_packed_sequences_hold_the_examples_of_the_files(prepared, train):
    folder = prepared / "all"
    tokens, mask = IndexedDataset(str(folder / "text")), IndexedDataset(str(folder / "completion"))
    written = {(tuple(tokens[i].tolist()), tuple(mask[i][1:].tolist())) for i in range(len(tokens))}
    seen = 0
    for index in range(8):
        sample = train[index]
        for segment in range(1, int(sample["segments"].max()) + 1):
            here = sample["segments"] == segment
            ids = [*sample["tokens"][here].tolist(), int(sample["labels"][here][-1])]
            assert sample["labels"][here].tolist() == ids[1:]
            assert (tuple(ids), tuple(sample["loss_mask"][here].int().tolist())) in written
            assert torch.equal(sample["position_ids"][here], torch.arange(len(ids) - 1))
            seen += 1
        assert not sample["loss_mask"][sample["segments"] == 0].any()
    assert seen >= 16


def test_an_epoch_is_every_training_example_once(prepared, train):
    count = 0
    starts = []
    while sum(starts) < 180:
        starts.append(int(train[count]["segments"].max()))
        count += 1
    assert sum(starts) == 180  # 90 % of 200
    assert train.epochs > 1


def test_ranks_share_the_sequences_of_one_rank(train):
    one = joined(batches(train), 32).view(8, 4, 2, 5, 128)
    for rank in range(4):
        mine = joined(batches(train, rank=rank, ranks=4), 8).view(8, 2, 5, 128)
        assert torch.equal(mine, one[:, rank])


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_goes_on_exactly_from_the_consumed_samples(prepared, train, workers):
    whole = joined(batches(train), 32)
    again = open_all(prepared)
    assert torch.equal(joined(batches(again, consumed=22, workers=workers), 21), whole[22:])


def test_the_order_depends_on_the_seed_alone_and_a_longer_plan_goes_on(prepared, train):
    first = joined(batches(train), 32)
    assert torch.equal(joined(batches(open_all(prepared, samples=80)), 32), first)
    assert not torch.equal(joined(batches(open_all(prepared, seed=2)), 32), first)


def test_every_epoch_has_another_order(prepared):
    dataset = open_all(prepared, samples=1000)
    per_epoch = len(dataset) // dataset.epochs
    first, second = dataset[0]["tokens"], dataset[per_epoch + 1]["tokens"]
    assert dataset.epochs > 10
    assert not torch.equal(first, second)


def test_queries_see_their_own_example_up_to_themselves_in_any_context_parallel_layout(train):
    whole = Batch(
        *(
            train[0][key][None]
            for key in ("tokens", "labels", "loss_mask", "position_ids", "segments")
        )
    )
    segments = whole.segments[0].tolist()
    size = len(segments)
    expected = torch.tensor(
        [[not (k <= q and segments[k] == segments[q]) for k in range(size)] for q in range(size)]
    )
    assert torch.equal(whole.attention_mask(0, 1)[0, 0], expected)
    held = [whole.of_context_rank(rank, 2) for rank in range(2)]
    places = [
        torch.cat((torch.arange(32) + 32 * r, torch.arange(32) + 32 * (3 - r))) for r in (0, 1)
    ]
    for rank in range(2):
        assert torch.equal(held[rank].tokens[0], whole.tokens[0][places[rank]])
        mask = whole.attention_mask(rank, 2)[0, 0]
        assert torch.equal(mask, expected[places[rank]][:, torch.cat(places)])


def test_the_command_tells_what_it_cut_and_left_out(prepared, capsys):
    assert command(prepared, "cut", "--sequence-length=100") == 0
    text = capsys.readouterr().out
    manifest = read_manifest(prepared / "cut")
    assert (manifest.kind, manifest.truncated, manifest.longest) == ("instruction", 29, 100)
    assert "29 examples lost their end" in text
    assert "--data.sequence_length 100" in text
    assert command(prepared, "drop", "--sequence-length=100", "--too-long=drop") == 0
    assert "left out: 29 examples that are too long" in capsys.readouterr().out
    assert read_manifest(prepared / "drop").documents == 171
    assert command(prepared, "short", "--sequence-length=30") == 0
    assert "left out: 29 examples with no completion" in capsys.readouterr().out


def test_a_bad_line_ends_the_command_with_its_place(prepared, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"messages": [}\n{"messages": []}\n')
    options = [f"--output={tmp_path / 'x'}", f"--tokenizer-from={prepared / 'tokenizer'}"]
    arguments = ["prepare-data", str(tmp_path / "bad.jsonl"), "--format=chat", "--workers=1"]
    assert main([*arguments, *options]) == 2
    assert "bad.jsonl:1: is not JSON" in capsys.readouterr().err
    assert main([*arguments, *options, "--max-bad=1"]) == 2
    assert "bad.jsonl:2: messages is no list of messages" in capsys.readouterr().err
    assert main([*arguments, f"--output={tmp_path / 'x'}"]) == 2
    assert "--format chat: needs the tokenizer" in capsys.readouterr().err
    for tokenizer, message in (
        (prepared / "tokenizer", "is no file; name a folder with --tokenizer-from"),
        (tmp_path / "none.json", "none.json is no file"),
    ):
        assert main([*arguments, options[0], f"--tokenizer={tokenizer}"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_settings_that_do_not_fit_instruction_data_are_refused(prepared, train, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "one two"}\n' * 9)
    tokenizer = prepared / "tokenizer"
    assert (
        main(
            [
                "prepare-data",
                str(tmp_path / "text.jsonl"),
                f"--output={tmp_path / 'text'}",
                f"--tokenizer-from={tokenizer}",
                "--workers=1",
            ]
        )
        == 0
    )
    chat = str(prepared / "all")
    for changes, message in (
        ({"datasets": [chat, str(tmp_path / "text")]}, r"is instruction data, but .*text is text"),
        ({"weights": [1.0]}, r"data\.weights: instruction datasets are taken by their sizes"),
        ({"sequence_length": 16}, r"data\.sequence_length: 16 is shorter than the longest example"),
    ):
        with pytest.raises(DataError, match=message):
            describe_datasets(settings(prepared, **changes))
    config = settings(prepared, split="9999,0.001,0")
    with pytest.raises(DataError, match="leaves no example of the 200"):
        open_datasets(config, describe_datasets(config), train_samples=8, valid_samples=8, seed=1)
