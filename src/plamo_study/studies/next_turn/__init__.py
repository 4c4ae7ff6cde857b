"""06-context, its second half: what does the next turn of a conversation cost?"""

from plamo_study.studies import Chapter, Study

CHAPTER = Chapter("06-context", "what does context cost", {"06-turns": Study("plan.turns")})
