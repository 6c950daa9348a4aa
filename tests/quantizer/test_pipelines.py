"""Pipelines and generation over packed experts give what they give over the same weights, decoded and dense.

Texts are by the small trained model of the package, images go through a tiny Qwen3-VL-MoE with random weights.
"""

import copy

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    pipeline,
)

import hf_mxfp4

PROMPTS = ["ROMEO.\nBut soft", "The king is", "MACBETH.\nIs this a dagger which I see before me, the handle"]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Packed model and tokenizer."""
    path, folder = hf_mxfp4.demo_model_path(), tmp_path_factory.mktemp("packed")
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=hf_mxfp4.MXFP4Config())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


@pytest.fixture(scope="module")
def packed(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def dense(packed):
    """The same weights in Transformers' own experts."""
    model = copy.deepcopy(packed)
    model.dequantize()
    assert not hf_mxfp4.packed_report(model).packed
    return model


def texts(writer, prompts=PROMPTS, **options):
    outputs = writer(list(prompts), **{**GREEDY, **options})
    return [output[0]["generated_text"] for output in outputs]


def generate(model, tokenizer, prompt=PROMPTS[0], **options):
    return model.generate(**tokenizer(prompt, return_tensors="pt"), **{**GREEDY, **options})


@pytest.mark.parametrize("by", ["path", "object"])
def test_text_generation(folder, packed, dense, tokenizer, by):
    model = str(folder) if by == "path" else packed
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer, dtype=torch.float32)
    hf_mxfp4.assert_packed(writer.model)
    expected = texts(pipeline("text-generation", model=dense, tokenizer=tokenizer))
    assert texts(writer) == expected
    assert all(len(text) > len(prompt) for text, prompt in zip(expected, PROMPTS, strict=True))


def test_text_generation_that_quantizes_a_dense_folder(packed, tokenizer):
    options = {"model_kwargs": {"quantization_config": hf_mxfp4.MXFP4Config()}, "dtype": torch.float32}
    writer = pipeline("text-generation", model=hf_mxfp4.demo_model_path(), tokenizer=tokenizer, **options)
    hf_mxfp4.assert_packed(writer.model)
    assert texts(writer) == texts(pipeline("text-generation", model=packed, tokenizer=tokenizer))


@pytest.mark.parametrize("batch_size", [2, 3])
def test_a_batch_with_padding_gives_the_texts_of_one_by_one(packed, tokenizer, batch_size):
    assert len({len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS}) == 3
    writer = pipeline("text-generation", model=packed, tokenizer=tokenizer)
    assert texts(writer, batch_size=batch_size) == texts(writer)


MODES = {
    "beam search": {"num_beams": 3},
    "several beams": {"num_beams": 2, "num_return_sequences": 2},
    "dynamic cache": {"cache_implementation": "dynamic"},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_generate_gives_the_tokens_of_dense_experts(packed, dense, tokenizer, mode):
    got, expected = (generate(model, tokenizer, **MODES[mode]) for model in (packed, dense))
    assert torch.equal(got, expected)
    if "beam" not in mode:
        assert torch.equal(got, generate(packed, tokenizer))


def test_sampling_with_a_seed_gives_the_tokens_of_dense_experts(packed, dense, tokenizer):
    tokens = []
    for model in (packed, dense):
        torch.manual_seed(0)
        tokens.append(generate(model, tokenizer, do_sample=True, top_k=5))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("assistant", ["packed", "dense"])
def test_an_assistant_changes_no_token(packed, dense, tokenizer, assistant):
    """Also a packed one, of which only few layers are left, so that it is often wrong."""
    helper = copy.deepcopy(packed if assistant == "packed" else dense)
    helper.model.layers = helper.model.layers[:1]
    helper.config.num_hidden_layers = 1
    assert torch.equal(generate(packed, tokenizer, assistant_model=helper), generate(packed, tokenizer))


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_generates_under(packed, tokenizer, guard):
    expected = generate(packed, tokenizer)
    with guard():
        assert torch.equal(generate(packed, tokenizer), expected)


def test_a_model_first_used_in_inference_mode_gives_gradients_later(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        generate(model, tokenizer)
    ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    model(ids, labels=ids).loss.backward()
    assert bool(model.get_input_embeddings().weight.grad.any())


def test_continuous_batching(packed, tokenizer):
    """Prompts of different lengths go through as one row of tokens, each token to its experts."""
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    greedy = GenerationConfig(**GREEDY, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    outputs = packed.generate_batch(inputs=prompts, generation_config=greedy, continuous_batching_config=small)
    got = [outputs[request].generated_tokens for request in sorted(outputs)]
    expected = [generate(packed, tokenizer, prompt)[0].tolist() for prompt in PROMPTS]
    assert got == [tokens[len(prompt) :] for tokens, prompt in zip(expected, prompts, strict=True)]


SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|end|>"]
TEMPLATE = """{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"""


@pytest.fixture(scope="module")
def processor():
    """Qwen3-VL's processor for images and text, with bytes for tokens and patches of 4 x 4; videos need torchvision."""
    pytest.importorskip("PIL", reason="images need Pillow")
    images = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    stock = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl")
    mixin = stock.ProcessorMixin

    class TinyProcessor(stock.Qwen3VLProcessor):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
            for name, token in zip(("image", "video", "vision_start", "vision_end"), SPECIAL, strict=False):
                setattr(self, f"{name}_token", token)
                setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
            mixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = {"pad_token": SPECIAL[-1], "eos_token": SPECIAL[-1], "additional_special_tokens": SPECIAL[:-1]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **tokens)
    patches = images.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
    return TinyProcessor(patches, fast, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def vision_folder(processor, tmp_path_factory):
    """A packed Qwen3-VL-MoE."""
    number = dict(zip(SPECIAL, processor.tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 96, "num_experts": 4}
    text |= {"num_experts_per_tok": 2, "vocab_size": len(processor.tokenizer)}
    text |= {"pad_token_id": number["<|end|>"], "eos_token_id": number["<|end|>"]}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
    vision |= {"patch_size": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(names, number.values(), strict=False))
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, **ids)
    torch.manual_seed(0)
    model = Qwen3VLMoeForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15) if parameter.ndim > 1 else None
    folder = tmp_path_factory.mktemp("vision")
    model.save_pretrained(folder / "dense")
    options = {"quantization_config": hf_mxfp4.MXFP4Config(), "dtype": torch.float32}
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder / "dense", **options)
    model.save_pretrained(folder / "packed")
    return folder / "packed"


def about(seed, question):
    """A message with an image of random pixels."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    content = [{"type": "image", "image": image.fromarray(pixels)}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("by", ["path", "object"])
def test_image_text_to_text(vision_folder, processor, by):
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(vision_folder, dtype=torch.float32)
    stock = copy.deepcopy(model)
    stock.dequantize()
    given = str(vision_folder) if by == "path" else model
    answerers = [
        pipeline("image-text-to-text", model=m, processor=processor, dtype=torch.float32) for m in (given, stock)
    ]
    hf_mxfp4.assert_packed(answerers[0].model)
    messages = [about(0, "What is it?"), about(1, "What is it?")]
    got, expected = (
        [answerer(text=m, return_full_text=False, max_new_tokens=8)[0]["generated_text"] for m in messages]
        for answerer in answerers
    )
    assert got == expected
    assert got[0] != got[1], "the image makes a difference"


def test_images_in_a_batch_with_padding(vision_folder, processor):
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(vision_folder, dtype=torch.float32)
    messages = [about(0, "What is it?"), about(1, "Which colour has the thing in it?")]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}

    def answers(batch):
        inputs = processor.apply_chat_template(batch, padding=True, **options)
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        return tokens[:, inputs["input_ids"].shape[1] :].tolist()

    assert answers(messages) == [answers([message])[0] for message in messages]
