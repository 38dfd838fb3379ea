"""The search of the built site, as its page computes it: lunr's scores, and what mkdocs-material does with them.

Every word of a query is a beginning. A page counts once more than its sections, and scores rise with the share of the
words that were found. The order of pages is that of their best entries.
"""

import json
import re
from pathlib import Path
from typing import Any

from lunr.builder import Builder
from lunr.stop_word_filter import stop_word_filter


class SiteSearch:
    def __init__(self, site: Path) -> None:
        content = json.loads((site / "search" / "search_index.json").read_text())
        self.separator = re.compile(content["config"]["separator"])
        builder = Builder()
        builder.ref("location")
        for name, field in content["config"]["fields"].items():
            builder.field(name, boost=field["boost"])
        builder.b(0)
        builder.pipeline.add(stop_word_filter)
        for entry in content["docs"]:
            builder.add(self._split(entry), {"boost": entry.get("boost", 1)})
        self.index = builder.build()

    def _split(self, entry: dict[str, Any]) -> dict[str, Any]:
        texts = {name: self.separator.sub(" ", entry[name]) for name in ("title", "text")}
        return {"location": entry["location"], "tags": entry.get("tags", []), **texts}

    def pages(self, query: str) -> dict[str, float]:
        """The addresses of the pages that the search shows with their scores, the best one first."""
        words = [word for word in self.separator.split(query.lower()) if word]
        scores: dict[str, float] = {}
        for result in self.index.search(" ".join(f"{word}*" for word in words)):
            matched = list(result["match_data"].metadata)
            counted = [word for word in words if stop_word_filter(word) or any(m.startswith(word) for m in matched)]
            found = sum(any(m.startswith(word) for m in matched) for word in counted) / len(counted)
            page, _, section = result["ref"].partition("#")
            score = result["score"] * (1 + ((not section) + found) ** 2)
            scores[page.strip("/")] = max(score, scores.get(page.strip("/"), 0.0))
        return dict(sorted(scores.items(), key=lambda pair: -pair[1]))
