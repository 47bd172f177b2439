// A search lights up everywhere: holders by all their words, other texts by themselves.
import type { Chapter } from "./model";

export interface Search { text: string; pattern: RegExp | null; error: string }

/** A regular expression; what is not one is an error that is shown. Small letters stand for capitals too. */
export function search(text: string): Search {
  if (text === "") return { text, pattern: null, error: "" };
  try {
    return { text, pattern: new RegExp(text, /[A-Z]/.test(text) ? "" : "i"), error: "" };
  } catch (error) {
    return { text, pattern: null, error: String((error as Error).message) };
  }
}

/** Which holders it lights up; null where nothing is searched for. */
export function lit(chapter: Chapter, search: Search): boolean[] | null {
  const { pattern } = search;
  return pattern ? chapter.holders.map((_, i) => pattern.test(chapter.textOf(i))) : null;
}
