"""Tiny models with random weights, and a toy word tokenizer, built here and never downloaded."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from invariant_rag.orderings import CrossEncoder, Embedding, MonoT5

WORDS = ("harbour", "lantern", "river", "salt", "bridge", "copper", "winter", "mill")


def word_tokenizer(specials, words, template, pair):
    """Return a tokenizer with one token per word."""
    vocabulary = {word: index for index, word in enumerate((*specials.values(), *words))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=specials["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single=template,
        pair=pair,
        special_tokens=[(name, vocabulary[name]) for name in specials.values()],
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, **specials)


@pytest.fixture(scope="session")
def t5_folder(tmp_path_factory):
    """Save a T5 of 2 layers and return its folder."""
    folder = tmp_path_factory.mktemp("t5")
    specials = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = ("Query:", "Document:", "Relevant:", "true", "false", *WORDS)
    word_tokenizer(specials, words, "$A </s>", "$A $B </s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, eos_token_id=1
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def monot5(t5_folder):
    return MonoT5(str(t5_folder), batch_size=2, device="cpu")


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    """Save a BERT classifier with one output and return its folder."""
    return save_bert(tmp_path_factory.mktemp("bert"), outputs=1)


def save_bert(folder, outputs):
    specials = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    word_tokenizer(specials, WORDS, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": outputs}
    BertForSequenceClassification(BertConfig(**sizes, **layers, initializer_range=1.0)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def cross_encoder(bert_folder):
    return CrossEncoder(str(bert_folder), batch_size=2, device="cpu")


@pytest.fixture(scope="session")
def embedding():
    """The real MiniLM, from its wheel."""
    return Embedding(batch_size=2, device="cpu")
