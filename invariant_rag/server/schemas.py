"""Requests: OpenAI's fields, with documents. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from invariant_rag.checks import SEEDS

MOST_DOCUMENTS = 1000  # of a request, a message or a part of one
Count = Annotated[int, Field(ge=1, le=1 << 31)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[float | None, Field(ge=-2, le=2, allow_inf_nan=False)]
Scalar = str | int | float | bool | None


class RequestBody(BaseModel):
    """What all requests share: no field that is not known, no value that has to be converted."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, protected_namespaces=())

    @field_validator("n", "stream", "tools", "documents", "invariant", mode="before", check_fields=False)
    @classmethod
    def _null_is_the_default(cls, value: Any, info: ValidationInfo) -> Any:
        """Take null for the default, as OpenAI's API does."""
        field = cls.model_fields[str(info.field_name)]
        return field.get_default(call_default_factory=True) if value is None and not field.is_required() else value


class DocumentBody(RequestBody):
    """A document, in the shape of vLLM and of chat templates (`title`, `text`) or of Cohere v2 (`data`)."""

    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """What citations call it. None: a name that follows from its contents."""
    title: str | None = None
    text: str | None = None
    data: str | dict[str, Scalar] | None = None
    """A text, or fields; `title` is the title, and the others are shown by name, unless there is one."""
    score: Real | None = None  # what a retriever gave it, for the ordering `score`
    metadata: dict[str, Scalar] = Field(default_factory=dict)
    """Other fields, which are no part of the prompt; `id` among them is the id of a document that has no other."""

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if (self.text is None) == (self.data is None):
            raise ValueError("expected either text or data")
        return self


Documents = Annotated[list[DocumentBody | str], Field(max_length=MOST_DOCUMENTS)]


class TextPart(RequestBody):
    """Text of a message."""

    type: Literal["text"]
    text: str


class DocumentPart(RequestBody):
    """A document in a message. Neighbouring ones form a set."""

    type: Literal["document"]
    document: DocumentBody


class SlotBody(RequestBody):
    """Text around one document of a set, such as `[1] `: it stays where it is when the documents are reordered."""

    before: str = ""
    after: str = ""
    number: str | None = None


class SetPart(RequestBody):
    """A set of documents in a message, with text around each document or without."""

    type: Literal["documents"]
    documents: Annotated[list[DocumentBody], Field(max_length=MOST_DOCUMENTS)]
    slots: Annotated[list[SlotBody], Field(max_length=MOST_DOCUMENTS)] | None = None


Part = Annotated[TextPart | DocumentPart | SetPart, Field(discriminator="type")]


class CalledFunction(RequestBody):
    """What an answer called, and with what: JSON in a text."""

    name: str
    arguments: str = "{}"
    parsed_arguments: Any = Field(default=None, exclude=True)
    """What `parse()` of the openai package has beside them; ignored."""


class Called(RequestBody):
    """A call that an answer made, as it is sent back."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, exclude=True)  # what chunks of a stream have beside it


class Message(RequestBody):
    """A message of a conversation. Fields of answers of this server are taken back, and ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    citations: list[Any] | None = None
    parsed: Any = None  # what `parse()` of the openai package makes of the content


class InvariantOptions(RequestBody):
    """How the documents are arranged, for this request."""

    method: str | None = None
    ordering: str | None = None
    overflow: Literal["error", "drop_last", "trim_segments"] | None = None


class StreamOptions(RequestBody):
    """Options of streams."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(RequestBody):
    """A schema by name, as OpenAI has it."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None  # false: the caller checks the answer, also what no grammar expresses of the schema


class ResponseFormat(RequestBody):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("expected json_schema with the type json_schema, and only there")
        return self


class Function(RequestBody):
    """A function that an answer may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # false: the caller checks arguments, also what no grammar expresses of their schema


class FunctionTool(RequestBody):
    """A tool, in OpenAI's shape."""

    type: Literal["function"]
    function: Function


class NamedTool(RequestBody):
    """The one tool to call."""

    type: Literal["function"]
    function: Annotated[dict[Literal["name"], str], Field(min_length=1)]


class Decoding(RequestBody):
    """What chats and completions share."""

    model: str | None = None
    documents: Documents = Field(default_factory=list)
    invariant: InvariantOptions = Field(default_factory=InvariantOptions)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[Real, Field(ge=0, le=2)] | None = None  # None and 0: greedy
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    min_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Real, Field(gt=0, le=10)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    logit_bias: Annotated[dict[str, Annotated[Real, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None

    @field_validator("seed")
    @classmethod
    def _within_seeds(cls, seed: int | None) -> int | None:
        if seed is not None and not SEEDS[0] <= seed <= SEEDS[1]:
            raise ValueError(f"expected a whole number from {SEEDS[0]} to {SEEDS[1]}")
        return seed


class ChatRequest(Decoding):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(Decoding):
    """`POST /v1/completions`. The documents come before the prompt, or are parts of it."""

    prompt: str | list[TokenId] | list[Part] | list[str] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: None = None


class RerankRequest(RequestBody):
    """`POST /v1/rerank` and `/v2/rerank`: the fields of Cohere's and Jina's."""

    model: str | None = None
    query: str
    documents: Annotated[list[DocumentBody | str], Field(min_length=1, max_length=MOST_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False


class JudgeOptions(InvariantOptions):
    """How answers are arranged for a judge: whole, and by their text."""

    overflow: Literal["error"] | None = None

    @field_validator("ordering")
    @classmethod
    def _by_text(cls, ordering: str | None) -> str | None:
        if ordering in ("given", "score"):
            raise ValueError(
                f"expected an ordering by text, got {ordering!r}: a verdict is that of every order, and answers have "
                "no scores"
            )
        return ordering


class JudgeRequest(RequestBody):
    """`POST /v1/judge`: which answer is the best, or which option is right."""

    model: str | None = None
    question: str | None = None
    answers: Annotated[list[str], Field(min_length=1, max_length=100)] | None = None
    options: Annotated[list[str], Field(min_length=1, max_length=100)] | None = None
    reference: str | None = None
    criteria: str | dict[str, str] | None = None
    by: Literal["letters", "texts"] = "letters"
    explain: bool = False
    max_tokens: Count | None = None
    invariant: JudgeOptions = Field(default_factory=JudgeOptions)

    @field_validator("max_tokens")
    @classmethod
    def _with_explain(cls, count: int | None, info: ValidationInfo) -> int | None:
        if count is not None and not info.data.get("explain"):
            raise ValueError("expected max_tokens only with explain")
        return count

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.answers is None) == (self.options is None):
            raise ValueError("expected either answers or options")
        if self.options is not None and (
            self.question is None or self.criteria is not None or self.reference is not None
        ):
            raise ValueError("expected a question with options, and neither criteria nor reference")
        return self


class TokenizeRequest(RequestBody):
    """`POST /tokenize`: a text, or a conversation as the model gets it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    documents: Documents = Field(default_factory=list)
    tools: list[FunctionTool] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        if self.prompt is not None and (self.documents or self.tools or self.chat_template_kwargs):
            raise ValueError("expected documents, tools and chat_template_kwargs with messages only")
        return self
