"""From rows on disk, or the generated task, to tokenised prompts and demonstrations in a resumable order."""
