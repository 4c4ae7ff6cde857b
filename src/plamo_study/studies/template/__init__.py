"""99-half-a-prompt: what does half a prompt cost? Copy this folder, and move its page to notebooks/."""

from plamo_study.studies import Chapter, Study

CHAPTER = Chapter("99-half-a-prompt", "what does half a prompt cost", {"99-half-a-prompt": Study("plan.halves")})
