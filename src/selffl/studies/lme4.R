# Mixed models by lme4: a folder with train.csv and test.csv, the kind of the outcome, and the terms that vary by group.
suppressMessages(library(lme4))
found <- commandArgs(trailingOnly = TRUE)
train <- read.csv(file.path(found[1], "train.csv"), colClasses = c(group = "character"))
test <- read.csv(file.path(found[1], "test.csv"), colClasses = c(group = "character"))
is_binary <- found[2] == "binary"
features <- paste(setdiff(names(train), c("group", "outcome")), collapse = " + ")
facts <- data.frame()
predictions <- list()
for (number in 3:length(found)) {
  text <- paste0("outcome ~ ", features, " + (", found[number], " | group)")
  said <- ""
  spent <- system.time(withCallingHandlers({
    if (is_binary) {
      fit <- glmer(as.formula(text), train, family = binomial,
                   control = glmerControl(optimizer = "bobyqa", calc.derivs = FALSE))
    } else {
      fit <- lmer(as.formula(text), train, REML = TRUE)
    }
    answer <- predict(fit, test, type = "response", allow.new.levels = TRUE)
  }, warning = function(w) { said <<- conditionMessage(w); invokeRestart("muffleWarning") },
     message = function(m) invokeRestart("muffleMessage")))
  variances <- paste(diag(as.matrix(VarCorr(fit)$group)), collapse = " ")
  facts <- rbind(facts, data.frame(seconds = spent[[1]] + spent[[2]], variances = variances, note = said))
  predictions[[paste0("model", number)]] <- answer
}
write.csv(facts, file.path(found[1], "facts.csv"), row.names = FALSE)
write.csv(as.data.frame(predictions), file.path(found[1], "predictions.csv"), row.names = FALSE)
