from collections.abc import Callable, Mapping

class Renderer:
    def __init__(
        self, *, escape: Callable[[str], str], missing_tags: str, partials: Mapping[str, str]
    ) -> None: ...
    def render(self, template: str, context: Mapping[str, object], /) -> str: ...
