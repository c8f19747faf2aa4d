// All formulas in one entry: a test loads it in a browser and compares its numbers with oncurve.algos.
export * from "./advantages";
export * from "./estimators";
export * from "./loss";
export * from "./policy";
export * from "./rules";
